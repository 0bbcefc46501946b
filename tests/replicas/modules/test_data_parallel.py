"""A module on several devices inside a network: the gradient of one device, whatever the split."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from tests.support.hanging import here_it_hangs

DEVICES = [1, 2, 3, 5]


class Mixed(nn.Module):
    """What could tell one place from another: random numbers and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(self.norm(self.first(x))).tanh())


class Tables(nn.Module):
    """Nested tensors go in, others come out, beside what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, batch: dict[str, Any], *, scale: torch.Tensor, name: str = "n") -> dict[str, Any]:
        first, (second, empty) = batch["pair"], batch["deep"]
        return {"out": (first * self.weight, [second.exp() * scale]), "empty": empty * 2, "name": name}


def mixed(dtype: torch.dtype = torch.float32) -> Mixed:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Mixed().to(dtype)


def batch(samples: int, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, *(shape or (4,)), generator=generator, dtype=dtype)


def cpus(count: int) -> list[str]:
    return ["cpu"] * count


def trained(net: nn.Module, x: torch.Tensor, steps: int = 3) -> str:
    """Train for a few steps; give the digest of all that came of it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    outputs = []
    with torch.random.fork_rng():
        torch.manual_seed(7)
        for _ in range(steps):
            optimizer.zero_grad()
            x = x.detach().requires_grad_()
            output = net(x)
            output.square().mean().backward()
            optimizer.step()
            outputs += [output.detach(), x.grad]
        after = torch.rand(1)
    return ls.digest(net, outputs, after)


def test_with_a_number_of_shards_the_devices_do_not_matter() -> None:
    found = {
        trained(ls.DataParallel(mixed(), cpus(devices), num_shards=5, workloads=loads), batch(12))
        for devices in DEVICES
        for loads in (None, list(range(1, devices + 1)))
    }
    assert len(found) == 1


def test_the_number_of_shards_does_matter() -> None:
    found = {trained(ls.DataParallel(mixed(), cpus(1), num_shards=count), batch(12)) for count in (1, 2, 3)}
    assert len(found) == 3


@pytest.mark.usefixtures("one_intra_op_thread")
@pytest.mark.parametrize("parallel_backward", [True, False])
@pytest.mark.parametrize("devices", DEVICES)
def test_one_shard_has_the_bits_of_the_bare_module(devices: int, parallel_backward: bool) -> None:
    bare = mixed()
    bare.drop.p = 0.0
    module = copy.deepcopy(bare)
    net = ls.DataParallel(module, cpus(devices), num_shards=1, parallel_backward=parallel_backward)
    x = [batch(6).requires_grad_() for _ in range(2)]
    for model, given in ((bare, x[0]), (net, x[1])):
        model(given).square().mean().backward()
    assert torch.equal(x[0].grad, x[1].grad)
    assert ls.digest(net) == ls.digest(bare)
    for own, other in zip(net.parameters(), bare.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


def gradients(net: nn.Module, x: torch.Tensor, criterion: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    x = x.detach().requires_grad_()
    net.zero_grad()
    criterion(net(x)).backward()
    return [x.grad, *[parameter.grad for parameter in net.parameters()]]


def contrast(output: torch.Tensor) -> torch.Tensor:
    """Compare every sample with every other one: nothing that a mean over shards could give."""
    return torch.cdist(output, output).exp().log1p().sum().sqrt()


@pytest.mark.parametrize("parallel_backward", [True, False])
@pytest.mark.parametrize("criterion", [torch.sum, lambda output: output[3:].square().mean(), contrast])
@pytest.mark.parametrize("devices", DEVICES)
def test_any_criterion_has_the_gradient_of_one_device(
    devices: int, criterion: Callable[[torch.Tensor], torch.Tensor], parallel_backward: bool
) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)).double()
    net = nn.Sequential(
        nn.Linear(4, 4).double(),
        ls.DataParallel(copy.deepcopy(bare), cpus(devices), parallel_backward=parallel_backward),
        nn.Tanh(),
    )
    plain = nn.Sequential(copy.deepcopy(net[0]), bare, nn.Tanh())
    x = batch(7, dtype=torch.float64)
    for own, other in zip(gradients(net, x, criterion), gradients(plain, x, criterion), strict=True):
        assert torch.allclose(own, other, rtol=1e-12, atol=1e-14)  # sums are in another order


@pytest.mark.parametrize("parallel_backward", [True, False])
def test_nests_go_in_and_out(parallel_backward: bool) -> None:
    net = ls.DataParallel(Tables(), cpus(3), dim=1, parallel_backward=parallel_backward)
    first, second = batch(2, 5).requires_grad_(), batch(3, 5, 2).requires_grad_()
    scale = torch.tensor(2.0, requires_grad=True)
    given = {"pair": first, "deep": (second, torch.zeros(4, 0))}
    output = net(given, scale=scale, name="kept")
    assert output["name"] == "kept"
    assert isinstance(output["out"], tuple)
    assert isinstance(output["out"][1], list)
    assert torch.equal(output["out"][0], first * 1.5)
    assert torch.equal(output["out"][1][0], second.exp() * 2)
    assert output["empty"].shape == (4, 0)
    (output["out"][0].sum() + output["out"][1][0].sum()).backward()
    assert torch.equal(first.grad, torch.full_like(first, 1.5))
    assert torch.equal(second.grad, second.detach().exp() * 2)
    assert torch.allclose(scale.grad, second.exp().sum())  # a sum over shards has another order
    assert torch.allclose(net.module.weight.grad, first.sum())


def test_outputs_that_need_no_gradient_have_none() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores = self.layer(x)
            return scores, scores.argmax(1), scores.detach(), scores.mean()

    net = ls.DataParallel(Several(), cpus(2))
    scores, classes, constant, mean = net(batch(5))
    assert [each.requires_grad for each in (scores, classes, constant, mean)] == [True, False, False, True]
    assert torch.equal(classes, scores.argmax(1))
    assert torch.allclose(mean, scores.mean())
    mean.backward()
    assert torch.allclose(net.module.layer.bias.grad, torch.full((3,), 1 / 3))


def test_repeated_backwards_accumulate() -> None:
    bare, x = nn.Linear(4, 3), batch(5)
    net = ls.DataParallel(copy.deepcopy(bare), cpus(2), num_shards=2)
    plain = [bare(part).sum() for part in (x, 2 * x)]
    for part in plain:
        part.backward()
    outputs = [net(part).sum() for part in (x, 2 * x)]  # two graphs at once
    for output in reversed(outputs):
        output.backward()
    assert torch.allclose(net.module.weight.grad, bare.weight.grad)


def test_a_graph_can_be_kept_and_is_gone_otherwise() -> None:
    net = ls.DataParallel(nn.Linear(4, 3), cpus(2))
    loss = net(batch(5)).square().sum()
    loss.backward(retain_graph=True)
    once = net.module.weight.grad.clone()
    loss.backward()
    assert torch.equal(net.module.weight.grad, 2 * once)
    output = net(batch(5))
    output.sum().backward()
    with pytest.raises(ls.OrderError, match="must follow one with retain_graph=True"):
        output.sum().backward()


def test_gradients_can_be_differentiated_where_that_was_asked_for() -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    penalties = []
    for net in (bare, ls.DataParallel(copy.deepcopy(bare), cpus(3), parallel_backward=False)):
        x = batch(7, dtype=torch.float64).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        penalties.append([x.grad, *[each.grad for each in net.parameters() if each.grad is not None]])
    assert len(penalties[0]) == len(penalties[1])
    for one, other in zip(*penalties, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)  # sums are in another order


class Shifted(nn.Linear):
    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return super().forward(x + shift).tanh()


@pytest.mark.usefixtures("one_intra_op_thread")
def test_an_input_that_every_shard_gets_whole_has_the_same_gradient_in_both_ways() -> None:
    found = set()
    for devices, parallel in [(1, True), (1, False), (2, False), (3, False), (5, False)]:
        torch.manual_seed(0)
        dims = {"x": 0, "shift": None}
        net = ls.DataParallel(Shifted(4, 3), cpus(devices), dim=dims, num_shards=5, parallel_backward=parallel)
        shift = torch.randn(4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        net(batch(13), shift * 2).square().mean().backward()
        found.add(ls.digest({"shift": shift.grad, "weight": net.module.weight.grad}))
    assert len(found) == 1


def test_gradients_made_by_threads_cannot_be_differentiated_and_say_so() -> None:
    net = ls.DataParallel(nn.Linear(4, 1), cpus(2))
    x = batch(5).requires_grad_()
    with pytest.raises(ls.OrderError, match="Create it with parallel_backward=False"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)


@pytest.mark.usefixtures("one_intra_op_thread")
def test_the_serial_way_has_the_bits_of_the_parallel_one() -> None:
    found = {
        trained(ls.DataParallel(mixed(), cpus(devices), num_shards=5, parallel_backward=parallel), batch(12))
        for devices in DEVICES
        for parallel in (True, False)
    }
    assert len(found) == 1


class Recurrent(nn.Module):
    """Weights that a module keeps in a second list, and one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True, dropout=0.3)
        self.out = nn.Linear(4, 9, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, (last, _) = self.lstm(self.embed(x))
        return self.out(hidden) + last.sum((0, 2))[:, None, None]


@pytest.mark.usefixtures("one_intra_op_thread")
def test_recurrent_and_tied_modules_have_the_same_bits_both_ways() -> None:
    tokens = torch.randint(9, (6, 3), generator=torch.Generator().manual_seed(2))
    found = set()
    for devices, parallel in [(1, True), (3, True), (1, False), (3, False)]:
        torch.manual_seed(0)
        net = ls.DataParallel(Recurrent(), cpus(devices), num_shards=3, parallel_backward=parallel)
        for _ in range(2):
            net(tokens).square().mean().backward()
        found.add(ls.digest(net, [parameter.grad for parameter in net.parameters()]))
    assert len(found) == 1


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.body = mixed()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_inside_keeps_the_bits_on_any_devices(reentrant: bool) -> None:
    found = {
        trained(ls.DataParallel(Checkpointed(reentrant=reentrant), cpus(devices), num_shards=3), batch(12))
        for devices in DEVICES
    }
    assert len(found) == 1


def test_activation_checkpointing_around_keeps_the_bits() -> None:
    class Around(nn.Module):
        def __init__(self, *, used: bool) -> None:
            super().__init__()
            self.body = ls.DataParallel(mixed(), cpus(2), num_shards=3)
            self.body.module.norm = nn.LayerNorm(6)  # statistics would be updated twice, as in torch
            self.used = used

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, x, use_reentrant=False) if self.used else self.body(x)

    assert trained(Around(used=True), batch(12)) == trained(Around(used=False), batch(12))


def test_an_output_may_be_written_in_place() -> None:
    for devices in (1, 2):
        net = nn.Sequential(ls.DataParallel(nn.Linear(4, 3), cpus(devices)), nn.ReLU(inplace=True))
        net(batch(5)).sum().backward()
        assert net[0].module.weight.grad is not None


def test_no_graph_is_kept_where_none_is_wanted() -> None:
    net = ls.DataParallel(nn.Linear(4, 3), cpus(2))
    with torch.no_grad():
        assert not net(batch(5)).requires_grad
    with torch.inference_mode():
        assert net(batch(5)).is_inference()
    net.requires_grad_(False)
    assert not net(batch(5)).requires_grad
    x = batch(5).requires_grad_()
    net(x).sum().backward()
    assert torch.equal(x.grad, net.module.weight.sum(0).expand(5, 4))


def test_a_frozen_parameter_has_no_gradient_and_hooks_see_the_whole_one() -> None:
    net = ls.DataParallel(nn.Linear(4, 3), cpus(2))
    net.module.weight.requires_grad_(False)
    seen: list[torch.Tensor] = []
    net.module.bias.register_hook(seen.append)
    net(batch(5)).sum().backward()
    assert net.module.weight.grad is None
    assert [each.tolist() for each in seen] == [[5.0, 5.0, 5.0]]


def test_autocast_of_the_caller_reaches_all_shards() -> None:
    net = ls.DataParallel(nn.Linear(4, 3), cpus(2))
    with torch.autocast("cpu", torch.bfloat16):
        output = net(batch(5))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert net.module.weight.grad.dtype == torch.float32


def modes(net: ls.DataParallel) -> list[bool]:
    return [module.training for replica in net.replicas for module in replica.modules()]


def test_what_is_done_to_the_module_reaches_all_replicas() -> None:
    net = nn.Sequential(ls.DataParallel(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), cpus(3)))
    inner: Any = net[0]
    assert modes(inner) == [True] * 9
    net.eval()
    assert modes(inner) == [False] * 9
    assert torch.equal(net(batch(5)), net(batch(5)))
    net.train()
    assert modes(inner) == [True] * 9
    net.apply(lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.Linear) else None)
    assert [bool((replica[0].weight == 1).all()) for replica in inner.replicas] == [True] * 3
    net.requires_grad_(False)
    assert not any(each.requires_grad for replica in inner.replicas for each in replica.parameters())
    net.double()
    assert {each.dtype for replica in inner.replicas for each in replica.parameters()} == {torch.float64}
    inner.module[1] = nn.Identity()
    assert [type(replica[1]) for replica in inner.replicas] == [nn.Identity] * 3


def test_replicas_on_one_memory_add_no_parameter_memory() -> None:
    net = ls.DataParallel(nn.Linear(4, 3), cpus(3))
    pointers = {each.data_ptr() for replica in net.replicas for each in replica.parameters()}
    assert pointers == {each.data_ptr() for each in net.parameters()}


def test_buffers_are_combined_as_in_an_update() -> None:
    means = {}
    for rule in ("mean", "first"):
        net = ls.DataParallel(nn.BatchNorm1d(4, momentum=1.0), cpus(2), buffers=rule)
        x = batch(5)
        net(x)
        means[rule] = net.module.running_mean.clone()
        assert net.module.num_batches_tracked == 1
    assert torch.allclose(means["mean"], x.mean(0))
    assert torch.equal(means["first"], x[:3].mean(0))


def test_the_state_is_saved_and_loaded_without_a_prefix() -> None:
    net = nn.Sequential(ls.DataParallel(mixed(), cpus(2)))
    bare = nn.Sequential(mixed())
    net(batch(5))
    assert list(net.state_dict()) == list(bare.state_dict())
    bare.load_state_dict(net.state_dict())
    assert ls.digest(bare) == ls.digest(net)
    other = nn.Sequential(Mixed())
    net.load_state_dict(other.state_dict())
    assert ls.digest(other) == ls.digest(net)
    assert torch.equal(net[0].replicas[1].first.weight, other[0].first.weight)


def first_of(_index: int) -> None:
    """Prepare nothing; only there to be pickled."""


def test_it_can_be_copied_pickled_and_put_on_other_devices() -> None:
    net = ls.DataParallel(mixed(), cpus(2), num_shards=3, flatten_parameters=True, worker_init_fn=first_of)
    wanted = trained(net, batch(12))
    stored = io.BytesIO()
    torch.save(net, stored)
    stored.seek(0)
    pickled = pickle.loads(pickle.dumps(net))  # noqa: S301 - our own bytes
    twins = [copy.deepcopy(net), pickled, torch.load(stored, weights_only=False)]
    again = trained(net, batch(12))
    assert again != wanted
    for twin in twins:
        assert ls.digest(twin) != ls.digest(net)
        assert twin.place_on(cpus(3)) is twin
        assert len(twin.replicas) == 3
        assert trained(twin, batch(12)) == again


def test_a_copy_shares_nothing_with_the_original() -> None:
    net = ls.DataParallel(nn.Linear(4, 3), cpus(2))
    net(batch(5))
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.module.weight.zero_()
    assert torch.equal(twin(batch(5)), twin.module.bias.expand(5, 3))
    assert not torch.equal(net(batch(5)), net.module.bias.expand(5, 3))


def test_the_user_s_function_prepares_every_thread_once() -> None:
    calls: list[tuple[int, int]] = []

    def prepare(index: int) -> None:
        torch.manual_seed(index)  # may draw or seed: shards do not see it
        calls.append((index, threading.get_ident()))

    with torch.random.fork_rng():
        net = ls.DataParallel(nn.Dropout(0.5), cpus(3), worker_init_fn=prepare)
        for _ in range(3):
            net(batch(5).requires_grad_()).sum().backward()
        assert sorted(index for index, _ in calls) == [0, 1, 2]
        assert len({thread for _, thread in calls}) == 3
        assert calls[0][1] != threading.get_ident() or (0, threading.get_ident()) in calls
        net.release()
        net(batch(5))
    assert len(calls) == 6


def test_the_batch_is_cut_by_workload_and_idle_devices_are_passed_over() -> None:
    sizes: list[int] = []

    class Sized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            return x

    net = ls.DataParallel(Sized(), cpus(3), workloads=[3, 2, 1])
    net(batch(12))
    assert sorted(sizes) == [2, 4, 6]
    sizes.clear()
    assert torch.equal(net(batch(2)), batch(2))
    assert sizes == [1, 1]


class Failing(nn.Module):
    """Fails where it is told to, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, at: torch.Tensor, phase: str) -> torch.Tensor:
        output = self.layer(x)
        if bool(at.any()) and phase == "forward":
            raise ArithmeticError("on purpose")
        if bool(at.any()) and phase == "backward":
            output.register_hook(fail)
        return output


def fail(_gradient: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_shard_that_fails_says_where_and_the_module_goes_on(phase: str, at: int) -> None:
    net = ls.DataParallel(Failing(), cpus(3), num_shards=5)
    where = torch.arange(5) == at
    before = torch.get_rng_state()
    with pytest.raises(ls.ReplicaError, match=f"The {phase} of shard {at} .*ArithmeticError on cpu") as caught:
        net(batch(5), where, phase).sum().backward()
    assert (caught.value.shard, caught.value.device) == (at, "cpu")
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert net.module.layer.weight.grad is None
    assert not torch.equal(torch.get_rng_state(), before)  # one key was drawn
    net(batch(5), where, "neither").sum().backward()
    assert net.module.layer.bias.grad.tolist() == [5.0] * 3


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, stop: torch.Tensor, phase: str) -> torch.Tensor:
        output = self.layer(x)
        if bool(stop.any()) and phase == "forward":
            raise KeyboardInterrupt
        if bool(stop.any()) and phase == "backward":
            output.register_hook(interrupt)
        return output


def interrupt(_gradient: torch.Tensor) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_interrupt_leaves_it_usable(phase: str, at: int) -> None:
    net = ls.DataParallel(Interrupted(), cpus(3))
    with pytest.raises(KeyboardInterrupt):
        net(batch(3), torch.arange(3) == at, phase).sum().backward()
    assert net.module.layer.weight.grad is None
    net(batch(3), torch.zeros(3, dtype=torch.bool), phase).sum().backward()
    assert net.module.layer.bias.grad.tolist() == [3.0] * 3


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_ctrl_c_leaves_it_usable(phase: str) -> None:
    """The user interrupts while a worker is busy: the main thread gives up waiting."""
    through, working, go_on = (threading.Event() for _ in range(3))

    def wait(_gradient: torch.Tensor | None = None) -> None:
        if threading.current_thread() is threading.main_thread():
            through.set()
        else:
            working.set()
            go_on.wait(10)  # where Ctrl-C comes while the main thread has work of its own, it waits for ours

    def busy(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        del module, args
        if not go_on.is_set():
            wait() if phase == "forward" else output.register_hook(wait)

    def press() -> None:
        through.wait(60)
        working.wait(60)
        time.sleep(0.1)  # by then the main thread waits
        os.kill(os.getpid(), signal.SIGINT)

    net = ls.DataParallel(nn.Linear(4, 3), cpus(2))
    net.module.register_forward_hook(busy)
    presser = threading.Thread(target=press)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            net(batch(3)).sum().backward()
    finally:
        go_on.set()
        presser.join()
    net(batch(3)).sum().backward()
    assert net.module.bias.grad.tolist() == [3.0] * 3


@pytest.mark.usefixtures("patiently")
def test_a_thread_that_hangs_is_named_and_left_behind() -> None:
    def hang(module: nn.Module, args: Any) -> None:
        del module
        if bool((args[0] == 7).any()):
            here_it_hangs()

    net = ls.DataParallel(nn.Linear(4, 3), cpus(2), timeout=0.2)
    net.module.register_forward_pre_hook(hang)
    with pytest.raises(ls.ReplicaError, match=r"cpu.* did not finish within 0.2 seconds") as caught:
        net(torch.cat([batch(2), torch.full((2, 4), 7.0)]))
    assert caught.value.device == "cpu"
    assert torch.allclose(net(batch(4)), net.module(batch(4)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net: net(batch(0)), "`batch` must hold at least one sample"),
        (lambda net: net(3), "`batch` must hold a tensor with a dimension that counts samples"),
        (lambda net: net(torch.tensor(1.0)), r"`input` must have a dimension 0 to count samples by"),
        (lambda net: net({"a": batch(3), "b": batch(2)}), r"`input\['b'\]` must hold as many samples"),
    ],
)
def test_inputs_it_refuses(call: Callable[[ls.DataParallel], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(ls.DataParallel(nn.Identity(), cpus(2)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"devices": []}, ValueError, "`devices` must name at least one device"),
        ({"devices": ["cuda:99"]}, ValueError, "`devices` must name devices of this machine"),
        ({"workloads": [1.0]}, ValueError, "`workloads` must hold one number per device"),
        ({"workloads": [1.0, 0.0]}, ValueError, "must be positive and finite"),
        ({"num_shards": True}, TypeError, "`num_shards` must be an integer, got True"),
        ({"num_shards": 0}, ValueError, "`num_shards` must be at least 1, got 0"),
        ({"use_nccl": True}, ValueError, "`flatten_parameters` must be True if `use_nccl` is"),
        ({"buffers": "last"}, ValueError, "`buffers` must be one of 'mean', 'first', 'sum', 'min', 'max', or a dict"),
        ({"module": 3}, TypeError, "`module` must be a torch.nn.Module, got a int"),
    ],
)
def test_options_it_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ls.DataParallel(**{"module": nn.Linear(4, 3), "devices": cpus(2), **options})


def test_without_several_gpus_nccl_changes_nothing() -> None:
    found = {
        trained(ls.DataParallel(mixed(), cpus(2), flatten_parameters=True, use_nccl=use), batch(12))
        for use in (True, False)
    }
    assert len(found) == 1


@pytest.mark.parametrize("parallel_backward", [True, False])
def test_a_module_without_parameters_passes_gradients_on(parallel_backward: bool) -> None:
    net = ls.DataParallel(nn.Tanh(), cpus(2), parallel_backward=parallel_backward)
    assert not net(batch(5)).requires_grad
    x = batch(5).requires_grad_()
    net(x).sum().backward()
    assert torch.allclose(x.grad, 1 - x.detach().tanh().square())


def test_inside_an_updater_the_devices_do_not_matter() -> None:
    found = set()
    for outer in (1, 2):
        for inner in (1, 2):
            net = nn.Sequential(ls.DataParallel(mixed(), cpus(inner), num_shards=2), nn.Linear(3, 3))
            with torch.random.fork_rng():
                torch.manual_seed(0)
                nn.init.normal_(net[1].weight)
                nn.init.normal_(net[1].bias)
            data = torch.utils.data.TensorDataset(batch(24), torch.arange(24) % 3)
            updater = ls.ParallelUpdater(
                ls.BatchIterator(data, batch_size=12, shuffle=True, seed=0),
                torch.optim.SGD(net.parameters(), lr=0.1),
                net,
                devices=cpus(outer),
                num_shards=3,
                loss_fn=ls.supervised(nn.functional.cross_entropy),
            )
            for _ in range(4):
                assert updater.update().applied
            updater.finalize()
            found.add(ls.digest(net))
    assert len(found) == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, and they are not there")
@pytest.mark.parametrize("own_stream", [True, False])
@pytest.mark.parametrize("use_nccl", [True, False])
def test_on_gpus_the_bits_are_those_of_one(use_nccl: bool, own_stream: bool) -> None:
    found = set()
    for devices in (["cuda:0"], ["cuda:0", "cuda:1"]):
        net = ls.DataParallel(mixed(), devices, num_shards=4, flatten_parameters=True, use_nccl=use_nccl)
        with torch.cuda.stream(torch.cuda.Stream("cuda:0") if own_stream else None):
            found.add(trained(net, batch(12).to("cuda:0")))
        torch.cuda.synchronize()
    assert len(found) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own look
def test_a_network_around_it_can_be_compiled() -> None:
    digests = set()
    for compiled in (False, True):
        torch._dynamo.reset()
        net = nn.Sequential(nn.Tanh(), ls.DataParallel(mixed(), cpus(2), num_shards=3), nn.Tanh())
        if compiled:
            net.compile(backend="eager")
        digests.add(trained(net, batch(7)))
    torch._dynamo.reset()
    assert len(digests) == 1
