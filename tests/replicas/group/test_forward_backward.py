"""A group's forward and backward: outputs in order, gradients of one device, whatever the split."""

from __future__ import annotations

import _thread
import random
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.backward import in_backward
from tests.support.hanging import here_it_hangs

THREE = ["cpu"] * 3


def batch(size: int = 7) -> torch.Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(size))


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


class Loss(nn.Module):
    """Returns its own loss, a mean over samples, beside what it predicts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layer(x)
        return {"loss": nn.functional.cross_entropy(scores, target), "scores": scores}


def test_outputs_are_in_the_order_of_samples() -> None:
    x = torch.arange(28.0).reshape(7, 4)
    with ls.ReplicaGroup(nn.Identity(), THREE, workloads=[1, 3, 1]) as group:
        assert torch.equal(group.forward(x), x)
        assert group.slices == [slice(0, 2), slice(2, 6), slice(6, 7)]
        assert group.batch_size == 7
        parts = group.outputs(merge=False)[0]
        assert [part.tolist() for part in parts] == [x[run].tolist() for run in group.slices]
        assert torch.equal(group.outputs()[0], x)
        assert group.output_shapes() == [("output", (7, 4))]


def test_devices_without_samples_rest() -> None:
    model = linear()
    with ls.ReplicaGroup(model, ["cpu"] * 4, input_grads=True) as group:
        group.forward(batch(2))
        group.backward(torch.ones(2, 3))
        assert [part is None for part in group.outputs(merge=False)[0]] == [False, False, True, True]
        assert [part is None for part in group.gradients(merge=False)["bias"]] == [False, False, True, True]
        assert [part is None for part in group.input_grads(merge=False)[0]] == [False, False, True, True]
        assert [run.stop - run.start for run in group.slices] == [1, 1, 0, 0]
    assert model.bias.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("loads", [[1, 1, 1], [1, 2, 4], [5, 1, 1]])
def test_a_mean_loss_has_the_gradient_of_one_device(loads: list[float]) -> None:
    x, target = batch(11).double(), torch.arange(11) % 3
    model, alone = Loss().double(), Loss().double()
    wanted = alone(x, target)
    wanted["loss"].backward()
    with ls.ReplicaGroup(model, THREE, workloads=loads) as group:
        out = group.forward((x, target))
        assert list(out) == ["loss", "scores"]
        group.backward()
    torch.testing.assert_close(out["loss"], wanted["loss"].detach(), rtol=1e-12, atol=0)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


class Reduced(nn.Linear):
    """Returns a loss of its own."""

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(4, 3)
        self.reduce = reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(super().forward(x).square())


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(
    ("reduce", "what"),
    [
        (torch.sum, " for some samples, of which parts have"),
        (lambda each: each.mean().sqrt(), " for some samples, of which parts have"),
        (lambda each: each.softmax(0).amax(1), "an output whose values for a sample depend on the other samples"),
        (torch.mean, ""),
        (lambda each: each.mean(0).sum(), ""),
    ],
)
def test_a_loss_that_is_no_mean_is_warned_of_once(devices: int, reduce: Any, what: str) -> None:
    group = ls.ReplicaGroup(Reduced(reduce), ["cpu"] * devices)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(6):
            returned = group.forward(batch() * torch.arange(1.0, 8)[:, None])
            group.backward(None if returned.dim() == 0 else torch.ones(7))
    group.close()
    assert len(said) == (devices > 1 and bool(what))
    assert all(what in str(each.message) for each in said)


def contrastive(rows: torch.Tensor) -> torch.Tensor:
    return (nn.functional.normalize(rows) @ nn.functional.normalize(rows).T).logsumexp(1).mean()


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(
    ("reduce", "what"),
    [
        (torch.sum, "for some samples, of which parts have"),
        (contrastive, "for some samples, of which parts have"),
        (lambda each: each.mean() / each.mean().detach(), "a value whose gradient"),
        (lambda each: (each @ each.T).sum(1), "depend on the other samples"),
        (lambda each: each + each.roll(1, 0), "depend on the other samples"),
        (lambda each: each - each.mean(0), "depend on the other samples"),
        (torch.mean, ""),
        (lambda each: each.sum(1), ""),
        (lambda each: each.sum().detach(), ""),
        (nn.functional.dropout, ""),
    ],
)
def test_a_loss_inside_of_a_data_parallel_that_is_no_mean_is_warned_of(num_shards: int, reduce: Any, what: str) -> None:
    parallel = ls.DataParallel(nn.Sequential(nn.Linear(4, 4), Reduced(reduce)), ["cpu"], num_shards=num_shards)
    x = batch().requires_grad_()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(6):
            (parallel(x).sum() + x.sum()).backward()
    assert len(said) == (num_shards > 1 and bool(what))
    assert all(what in str(each.message) for each in said)


def test_batches_may_be_dicts() -> None:
    x, target = batch(), torch.arange(7) % 3
    found = []
    for given in [(x, target), {"x": x, "target": target}]:
        model = Loss()
        with ls.ReplicaGroup(model, THREE) as group:
            group.forward(given)
            group.backward({"loss": torch.tensor(1.0)})
        found.append(ls.digest(model.layer.weight.grad))
    assert found[0] == found[1]


def test_an_input_given_whole_has_the_sum_as_gradient() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return x * scale

    x, scale = batch(), torch.arange(4.0)
    with ls.ReplicaGroup(Scaled(), THREE, batch_dim={"scale": None}, input_grads=True) as group:
        group.forward((x, scale))
        group.backward(torch.ones(7, 4))
        torch.testing.assert_close(group.input_grads()[1], x.sum(0))
        torch.testing.assert_close(sum(group.input_grads(merge=False)[1]), x.sum(0))
        assert torch.equal(group.input_grads()[0], scale.expand(7, 4))


def test_inputs_that_backward_does_not_reach_have_none() -> None:
    class Some(nn.Module):
        def forward(self, x: torch.Tensor, other: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            del other, index
            return x * 2

    with ls.ReplicaGroup(Some(), THREE, input_grads=True) as group:
        group.forward((batch(), batch(), torch.arange(7)))
        group.backward(torch.ones(7, 4))
        assert [grad is None for grad in group.input_grads()] == [False, True, True]


def test_write_add_and_null() -> None:
    model = linear()
    modes: Any = {"weight": "add"}
    with ls.ReplicaGroup(model, THREE, grad_mode=modes, fixed=["bias"]) as group:
        for _ in range(2):
            group.forward(batch())
            group.backward(torch.ones(7, 3))
        once = batch().sum(0).expand(3, 4)
        torch.testing.assert_close(model.weight.grad, 2 * once)
        assert model.bias.grad is None
        assert model.bias.requires_grad
        assert group.gradients(merge=False)["bias"] == [None] * 3
        torch.testing.assert_close(sum(group.gradients(merge=False)["weight"]), 2 * once)
        group.zero_grad()
        assert group.gradients() == {"weight": None, "bias": None}
        group.forward(batch())
        group.backward(torch.ones(7, 3))
        torch.testing.assert_close(model.weight.grad, once)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_optimizers_zero_grad_counts(devices: int, set_to_none: bool) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ls.ReplicaGroup(model, ["cpu"] * devices, grad_mode="add") as group:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            group.forward(batch())
            group.backward(torch.ones(7, 3))
            torch.testing.assert_close(model.weight.grad, batch().sum(0).expand(3, 4))
            torch.testing.assert_close(sum(group.gradients(merge=False)["weight"]), model.weight.grad)
            optimizer.step()


def test_parts_of_a_gradient_that_was_changed_are_forgotten() -> None:
    model = linear()
    with ls.ReplicaGroup(model, THREE) as group:
        group.forward(batch())
        group.backward(torch.ones(7, 3))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert group.gradients(merge=False) == {"weight": [None] * 3, "bias": [None] * 3}


def test_hooks_on_parameters_see_the_sum_once() -> None:
    model = linear()
    seen: list[torch.Tensor] = []
    model.bias.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
    with ls.ReplicaGroup(model, THREE) as group:
        group.forward(batch())
        group.backward(torch.ones(7, 3))
    assert [gradient.tolist() for gradient in seen] == [[7.0, 7.0, 7.0]]
    assert model.bias.grad.tolist() == [14.0, 14.0, 14.0]


def test_a_parameter_frozen_between_forward_and_backward_still_gets_its_gradient() -> None:
    model = linear()
    with ls.ReplicaGroup(model, THREE) as group:
        group.forward(batch())
        model.weight.requires_grad_(False)
        group.backward(torch.ones(7, 3))
        assert model.bias.grad.tolist() == [7.0, 7.0, 7.0]
        assert model.weight.grad is not None
        model.weight.grad = None
        group.forward(batch())
        group.backward(torch.ones(7, 3))
        assert model.weight.grad is None


def test_backward_again() -> None:
    model = linear()
    with ls.ReplicaGroup(model, THREE) as group:
        group.forward(batch())
        group.backward(torch.ones(7, 3), retain_graph=True)
        first = ls.digest(model.weight.grad)
        group.backward(torch.ones(7, 3))
        assert ls.digest(model.weight.grad) == first
        with pytest.raises(ls.OrderError, match="retain_graph=True"):
            group.backward(torch.ones(7, 3))


def test_a_group_that_does_not_train_has_no_gradients() -> None:
    model = nn.Sequential(linear(), nn.Dropout(0.5))
    with ls.ReplicaGroup(model, THREE, training=False) as group:
        out = group.forward(batch())
        torch.testing.assert_close(out, model[0](batch()).detach())
        assert not out.requires_grad
        with pytest.raises(ls.OrderError, match="training=False has no gradients"):
            group.backward(torch.ones(7, 3))
        with pytest.raises(ls.OrderError, match="require input_grads=True"):
            group.input_grads()
    assert model[0].weight.grad is None
    assert model.training


def test_evaluation_in_a_group_that_trains() -> None:
    model = nn.Sequential(linear(), nn.Dropout(0.5), nn.BatchNorm1d(3))
    with ls.ReplicaGroup(model, THREE) as group:
        before = ls.digest(model)
        out = group.forward(batch(), training=False)
        assert ls.digest(model) == before
        model.eval()
        torch.testing.assert_close(out, model(batch()).detach())
        group.backward(torch.ones(7, 3))
        assert model[0].bias.grad is not None


def test_random_numbers_are_keyed_by_the_default_generator() -> None:
    found = []
    for seed, devices in [(1, 1), (1, 3), (2, 3)]:
        with ls.ReplicaGroup(nn.Dropout(0.5), ["cpu"] * devices, num_shards=5) as group:
            torch.manual_seed(seed)
            found.append([ls.digest(group.forward(batch())) for _ in range(2)])
    assert found[0] == found[1]
    assert len({*found[0], *found[2]}) == 4


def test_writes_from_outside_are_noticed() -> None:
    model = linear()
    with ls.ReplicaGroup(model, THREE) as group:
        group.forward(batch())
        with torch.no_grad():
            model.weight.fill_(0.0)
            model.bias.fill_(3.0)
        assert group.forward(batch()).unique().tolist() == [3.0]
        model.load_state_dict({name: each + 1 for name, each in linear().state_dict().items()}, assign=True)
        torch.testing.assert_close(group.forward(batch()), model(batch()).detach())


def test_a_failure_names_the_device_and_leaves_the_group_usable() -> None:
    class Failing(nn.Linear):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails and threading.current_thread().name.startswith("lockstep-1"):
                raise RuntimeError("out of luck")
            return super().forward(x)

    model = Failing(4, 3)
    with ls.ReplicaGroup(model, THREE) as group:
        group.forward(batch())
        model.fails = True
        with pytest.raises(ls.ReplicaError, match=r"on cpu \(device 1 of 0..2\): out of luck") as caught:
            group.forward(batch())
        assert (caught.value.device, caught.value.shard) == ("cpu", 1)
        with pytest.raises(ls.OrderError, match="A forward must come first"):
            group.outputs()
        model.fails = False
        group.forward(batch())
        group.backward(torch.ones(7, 3))
    torch.testing.assert_close(model.bias.grad, torch.full([3], 7.0))


def fails_if_large(grad: torch.Tensor) -> None:
    if bool((grad > 2).any()):
        raise RuntimeError("too large")


def test_a_failure_in_backward_changes_no_gradient() -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return in_backward(super().forward(x), fails_if_large)

    model = Net(4, 3)
    with ls.ReplicaGroup(model, THREE) as group:
        group.forward(batch())
        group.backward(torch.ones(7, 3), retain_graph=True)
        before = ls.digest(model.weight.grad)
        with pytest.raises(ls.ReplicaError, match=r"The backward of shard 2 .* on cpu \(device 2 of 0..2\)"):
            group.backward(torch.tensor([1.0] * 6 + [3.0])[:, None].expand(7, 3), retain_graph=True)
        assert ls.digest(model.weight.grad) == before
        group.forward(batch())
        group.backward(torch.ones(7, 3))
        assert ls.digest(model.weight.grad) == before


@pytest.mark.usefixtures("patiently")
def test_a_thread_that_hangs_is_named_and_left_behind() -> None:
    class Hanging(nn.Linear):
        hangs = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.hangs and threading.current_thread().name.startswith("lockstep-1"):
                here_it_hangs()
            return super().forward(x)

    model = Hanging(4, 3)
    with ls.ReplicaGroup(model, THREE, timeout=0.5) as group:
        group.forward(batch())
        model.hangs = True
        with pytest.raises(ls.ReplicaError, match=r"shard 1 .* on cpu \(device 1 of 0..2\) did not finish"):
            group.forward(batch())
        model.hangs = False
        torch.testing.assert_close(group.forward(batch()), model(batch()).detach())


def test_an_interrupt_leaves_the_group_usable() -> None:
    class Interrupted(nn.Linear):
        interrupts = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.interrupts and threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return super().forward(x)

    model = Interrupted(4, 3)
    with ls.ReplicaGroup(model, THREE) as group:
        model.interrupts = True
        with pytest.raises(KeyboardInterrupt):
            group.forward(batch())
        model.interrupts = False
        torch.testing.assert_close(group.forward(batch()), model(batch()).detach())


def test_ctrl_c_while_a_thread_computes_leaves_the_group_usable() -> None:
    class Interrupting(nn.Linear):
        interrupts = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.interrupts and threading.current_thread().name.startswith("lockstep-1"):
                _thread.interrupt_main()
                time.sleep(0.2)
            return super().forward(x)

    model = Interrupting(4, 3)
    with ls.ReplicaGroup(model, THREE) as group:
        group.forward(batch())
        before = ls.digest(model)
        model.interrupts = True
        with pytest.raises(KeyboardInterrupt):
            group.forward(batch())
        model.interrupts = False
        assert ls.digest(model) == before
        torch.testing.assert_close(group.forward(batch()), model(batch()).detach())


def test_autocast_of_the_caller() -> None:
    model = linear()
    with ls.ReplicaGroup(model, THREE) as group:
        with torch.autocast("cpu", torch.bfloat16):
            out = group.forward(batch())
        assert out.dtype == torch.bfloat16
        group.backward(torch.ones(7, 3))
    assert model.weight.grad.dtype == torch.float32


def test_half_precision_is_summed_in_float32_and_rounded_once() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    x = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    with ls.ReplicaGroup(model, ["cpu"] * 2, num_shards=4) as group:
        group.forward(x)
        group.backward(torch.ones(4, 1))
    assert model.weight.grad.dtype == torch.bfloat16
    assert model.weight.grad.item() == 260.0  # 259 to the nearest; one by one bfloat16 stays at 256


def test_replicas_on_one_memory_add_no_parameter_memory() -> None:
    model = linear()
    with ls.ReplicaGroup(model, THREE) as group:
        group.forward(batch())
        addresses = {each.data_ptr() for replica in group.replicas for each in replica.parameters()}
    assert addresses == {each.data_ptr() for each in model.parameters()}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, and they are not there")
@pytest.mark.parametrize("home", ["cpu", "cuda:0"])
def test_several_gpus(home: str) -> None:
    """The sum is on the model's device, outputs on the first one, gradients of inputs on the inputs'."""
    model = nn.Sequential(linear(), nn.BatchNorm1d(3), nn.Dropout(0.5)).to(home)
    found = []
    for devices in (["cuda:0"], ["cuda:0", "cuda:1"], ["cuda:1", "cuda:0", "cuda:1"]):
        torch.manual_seed(3)
        model[1].reset_running_stats()
        with ls.ReplicaGroup(model, devices, num_shards=3, input_grads=True) as group:
            out = group.forward(batch())
            group.backward(torch.ones(7, 3))
            assert out.device == torch.device(devices[0])
            assert group.input_grads()[0].device.type == "cpu"
            assert model[0].weight.grad.device == torch.device(home)
            grads = [parameter.grad for parameter in model.parameters()]
            found.append(ls.digest(model, out, grads, group.input_grads()))
    assert len(set(found)) == 1


class MovedInBackward(torch.autograd.Function):
    """Compare with the rows of a memory bank, which move in backward as those of instance discrimination do."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(features)
        ctx.memory = memory
        return features @ memory.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (features,) = ctx.saved_tensors
        result = gradient @ ctx.memory
        ctx.memory.mul_(0.5).add_(features.mean(0), alpha=0.5)
        return result, None


class Bank(nn.Module):
    """A layer with a memory bank, and statistics that move in forward."""

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.moves = nn.Linear(4, 5), nn.BatchNorm1d(5), moves
        self.register_buffer("memory", torch.ones(6, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.layer(x))
        return MovedInBackward.apply(features, self.memory) if self.moves else features @ self.memory.T


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("moves", [True, False])
def test_a_buffer_that_backward_changes_is_named_once(devices: int, moves: bool) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    net = ls.DataParallel(Bank(moves=moves), ["cpu"] * devices, num_shards=2)
    with ls.ReplicaGroup(Bank(moves=moves), ["cpu"] * devices, num_shards=2) as group:
        for backward in (lambda: net(x).sum().backward(), lambda: group.backward(torch.ones_like(group.forward(x)))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    backward()
            texts = [str(each.message) for each in caught if "Backward changes" in str(each.message)]
            assert [text.partition(".")[0] for text in texts] == [
                "Backward changes buffers of the model: memory"
            ] * moves


class KeyEncoder(nn.Module):
    """Moves the weights of a second network in forward, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)

    @torch.no_grad()
    def _move(self) -> None:
        for mine, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
            mine.mul_(0.9).add_(other, alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._move()
        return self.query(x) * self.key(x)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_forward_that_writes_to_parameters_is_refused(devices: int) -> None:
    model = KeyEncoder()
    before = ls.digest(model)
    net = ls.DataParallel(model, ["cpu"] * devices, num_shards=devices)
    with ls.ReplicaGroup(KeyEncoder(), ["cpu"] * devices) as group:
        with pytest.raises(
            ValueError, match=r"must not write to its parameters while shards are computed.*'key\.weight'"
        ):
            net(batch())
        with pytest.raises(ValueError, match=r"'key\.weight'"):
            group.forward(batch(), training=True)
    assert ls.digest(model) == before
    with torch.no_grad():
        net(batch())  # as a first pass that initializes parameters


class Skipping(nn.Linear):
    """Leaves its layer out by chance, as stochastic depth does."""

    def __init__(self, draw: Callable[[], object]) -> None:
        super().__init__(4, 4)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.draw() else x


DRAWS: dict[str, Callable[[], object]] = {
    "Python's `random`": lambda: random.random() < 2,  # noqa: S311 - the one that is warned of
    "`numpy.random`": lambda: np.random.rand() < 2,
    "": lambda: torch.rand(()) < 2,
}


@pytest.mark.parametrize("drawn", DRAWS)
def test_a_forward_that_draws_from_other_generators_is_named_once(drawn: str) -> None:
    net = ls.DataParallel(Skipping(DRAWS[drawn]), ["cpu"] * 2)
    with ls.ReplicaGroup(Skipping(DRAWS[drawn]), ["cpu"] * 2) as group:
        for run in (net, lambda x: group.forward(x, training=True)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    run(batch())
            found = [str(each.message).partition(". ")[0] for each in caught]
            assert found == [f"The model draws from {drawn}"] * bool(drawn)
