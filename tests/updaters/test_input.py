"""Bad input gets a clear error before any work, and afterwards good input works as if nothing had been."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep as ls
from tests.support.late_copies import LateCopies
from tests.support.runs import (
    NUM_UPDATES,
    Placement,
    cross_entropy,
    finalized,
    state_digest,
    undisturbed,
    updater_for,
)
from tests.support.small_updater import updater_of
from tests.support.workloads import CONVNET, MLP

NUM_OWN = 40
"""The number of values of an iterator of one's own."""


def construct(**options: Any) -> ls.ParallelUpdater:
    model = options.pop("model", None) or MLP.model()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    iterator = options.pop("iterator", None) or ls.BatchIterator(MLP.data(), 9)
    return ls.ParallelUpdater(iterator, optimizer, model, **{"devices": ["cpu", "cpu"], **options})


BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "no device": ({"devices": []}, "`devices` must name at least one device, got none."),
    "unknown device": ({"devices": ["gpu"]}, "`devices` must "),
    "device not here": ({"devices": ["xpu:3"]}, "`devices` must name devices of this machine"),
    "NaN work load": (
        {"workloads": [1.0, math.nan]},
        "`workloads[1]` must be positive and finite, got nan.",
    ),
    "negative work load": (
        {"workloads": [-1.0, 1.0]},
        "`workloads[0]` must be positive and finite, got -1.0.",
    ),
    "infinite work load": (
        {"workloads": [1.0, math.inf]},
        "`workloads[1]` must be positive and finite, got inf.",
    ),
    "too few work loads": ({"workloads": [1.0]}, "`workloads` must hold one number per device (2), got 1."),
    "no work load": ({"workloads": []}, "`workloads` must hold at least one number, got none."),
    "no shard": ({"num_shards": 0}, "`num_shards` must be at least 1, got 0."),
    "no batch": ({"accumulate": 0}, "`accumulate` must be at least 1, got 0."),
    "no try": ({"max_tries": 0}, "`max_tries` must be at least 1, got 0."),
    "unknown precision": (
        {"precision": "fp8"},
        "`precision` must be one of 'fp32', 'bf16', 'fp16', 'bf16-true', 'fp16-true', got 'fp8'.",
    ),
    "loss scale 0": ({"loss_scale": 0.0}, "`loss_scale` must be finite and above 0, got 0.0."),
    "loss scale NaN": ({"loss_scale": math.nan}, "`loss_scale` must be finite and above 0, got nan."),
    "unknown overflow rule": (
        {"on_overflow": "redo"},
        "`on_overflow` must be 'retry', 'next' or 'skip', got 'redo'.",
    ),
    "unknown end": ({"on_exhausted": "stop"}, "`on_exhausted` must be 'skip' or 'raise', got 'stop'."),
    "unknown buffer rule": (
        {"buffers": "last"},
        "`buffers` must be one of 'mean', 'first', 'sum', 'min', 'max', or a dict",
    ),
    "a stranger's optimizer": (
        {"optimizer": torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)},
        "`optimizer` must hold parameters of `model` only, got one of shape (2, 3) in group 0 that does not belong to",
    ),
}

BAD_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "no iterator": (
        {"iterator": 3},
        (
            "`iterator` must be a lockstep Iterator, an iterable of batches or a function that returns one, "
            "got a int. `BatchIterator` makes batches of a dataset."
        ),
    ),
    "no optimizer": (
        {"optimizer": "sgd"},
        "`optimizer` must be a torch.optim.Optimizer, got a str. Create one from model.parameters().",
    ),
    "no model": (
        {"model": len, "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
        "`model` must be a torch.nn.Module, got a builtin_function_or_method.",
    ),
    "loss scale of text": (
        {"loss_scale": "8"},
        "`loss_scale` must be a number, a LossScale or None, got a str. Pass lockstep.DynamicLossScale(2.0**16).",
    ),
    "shards of text": ({"num_shards": "4"}, "`num_shards` must be an integer, got '4'. Pass int('4')."),
    "shards of truth": ({"num_shards": True}, "`num_shards` must be an integer, got True."),
    "half a shard": ({"num_shards": 2.5}, "`num_shards` must be an integer, got 2.5."),
    "half a try": ({"max_tries": 1.5}, "`max_tries` must be an integer, got 1.5."),
    "seed of truth": ({"seed": True}, "`seed` must be an integer, got True."),
    "no number of tries": ({"max_tries": None}, "`max_tries` must be an integer, got None."),
    "no number of batches": (
        {"accumulate": None},
        "`accumulate` must be an integer, a dict such as {0: 8, 4: 2}, or a function of the epoch, got None.",
    ),
    "no devices": ({"devices": None}, "`devices` must be names, a number or 'auto', got a NoneType."),
    "a loss by name": ({"loss_fn": "mse"}, "`loss_fn` must be callable, got a str."),
    "a step by name": ({"step_fn": "step"}, "`step_fn` must be callable, got a str."),
    "no converter": ({"converter": None}, "`converter` must be callable, got a NoneType."),
    "a backend": ({"communicator": "gloo"}, "`communicator` must be a Communicator or None, got a str."),
    "a criterion": (
        {"loss_fn": nn.CrossEntropyLoss()},
        (
            "`loss_fn` must take the model before the batch, got a criterion, CrossEntropyLoss. Pass "
            "lockstep.supervised(CrossEntropyLoss(...))."
        ),
    ),
    "seed of text": ({"seed": "a"}, "`seed` must be an integer, got 'a'."),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_is_refused_by_name(case: str) -> None:
    options, message = BAD_VALUES[case]
    with pytest.raises(ValueError, match="must") as caught:
        construct(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("case", BAD_TYPES)
def test_a_bad_type_is_refused_by_name(case: str) -> None:
    options, message = BAD_TYPES[case]
    with pytest.raises(TypeError) as caught:
        construct(**options)
    assert str(caught.value) == message


BAD_LOSSES: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "no scalar": (
        # One row, because which of several shards is the first to fail depends on their threads.
        lambda out: out[:1],
        ValueError,
        "`loss_fn` must return a loss of one element, got shape (1, 3). Take its mean.",
    ),
    "no tensor": (
        lambda out: out.mean().item(),
        TypeError,
        "`loss_fn` must return a tensor or a lockstep.Loss, got a float.",
    ),
    "nothing": (lambda _: None, TypeError, "`loss_fn` must return a tensor or a lockstep.Loss, got a NoneType."),
    "no gradient": (
        lambda out: out.mean().detach(),
        ValueError,
        (
            "`loss_fn` must return a loss that requires a gradient, got one that does not. Compute it from the "
            "output of the model it is given, without detach(), item() or no_grad()."
        ),
    ),
    "negative weight": (
        lambda out: ls.Loss(out.mean(), weight=-1),
        ValueError,
        "`weight` of a Loss must be finite and at least 0, got -1.0.",
    ),
    "NaN weight": (
        lambda out: ls.Loss(out.mean(), weight=torch.tensor(math.nan)),
        ValueError,
        "`weight` of a Loss must be finite and at least 0, got nan.",
    ),
}


@pytest.mark.each_value
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("case", BAD_LOSSES)
def test_a_loss_that_cannot_be_used_is_refused_and_good_ones_go_on(case: str, devices: int) -> None:
    spoil, kind, message = BAD_LOSSES[case]
    spoilt = False

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> Any:
        return spoil(model(x)) if spoilt else cross_entropy(model, x, target)

    with finalized(updater_for(CONVNET, Placement(devices), num_shards=5, loss_fn=loss_fn)) as updater:
        for update in range(NUM_UPDATES):
            if update in {0, 4}:
                spoilt = True
                before = ls.digest(updater.state_dict())
                with pytest.raises(kind) as caught:
                    updater.update()
                assert str(caught.value).startswith(message)
                assert ls.digest(updater.state_dict()) == before
                spoilt = False
            updater.update()
        assert state_digest(updater) == undisturbed(CONVNET, 5)


BAD_BATCHES: dict[str, tuple[Any, str]] = {
    "uneven": (
        (torch.ones(4, 6), torch.ones(3, 6)),
        "`batch[1]` must be as long as `batch[0]` along dimension 0 (4), got 3.",
    ),
    "uneven dict": (
        {"x": torch.ones(4, 6), "y": torch.ones(2)},
        "`batch['y']` must be as long as `batch['x']` along dimension 0 (4), got 2.",
    ),
    "empty": (torch.ones(0, 6), "`batch` must hold at least one sample, got none."),
    "no tensor": (("x", 3), "`batch` must hold at least one tensor, got none."),
    "no dimension": (torch.tensor(1.0), "`batch` must have a dimension 0 to count samples by, got shape ()."),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_batch_that_cannot_be_cut_is_refused(case: str) -> None:
    batch, message = BAD_BATCHES[case]
    with finalized(updater_for(CONVNET, Placement(2), num_shards=5)) as updater:
        before = ls.digest(updater.state_dict())
        with pytest.raises(ValueError, match="must") as caught:
            updater.compute_gradients(batch)
        assert str(caught.value).startswith(message)
        assert ls.digest(updater.state_dict()) == before
        with pytest.raises(ls.OrderError, match=r"`apply_gradients` must follow `compute_gradients`"):
            updater.apply_gradients()
        for _ in range(NUM_UPDATES):
            updater.update()
        assert state_digest(updater) == undisturbed(CONVNET, 5)


def test_post_accumulate_hooks_are_refused() -> None:
    updater = updater_for(CONVNET, Placement(2), num_shards=5)
    with finalized(updater):
        weight = updater.get_all_models()["main"][0].weight
        handle = weight.register_post_accumulate_grad_hook(lambda _: None)
        with pytest.raises(ValueError, match=r"no post-accumulate-grad hooks, got one on '0.weight'"):
            updater.update()
        handle.remove()
        for _ in range(NUM_UPDATES):
            updater.update()
        assert state_digest(updater) == undisturbed(CONVNET, 5)


def test_a_model_without_a_gradient_to_ask_for_is_refused() -> None:
    model = nn.Linear(1, 1).requires_grad_(False)
    with (
        updater_of(model, devices=2) as updater,
        pytest.raises(ValueError, match="must have a parameter that requires a gradient"),
    ):
        updater.update()


def test_a_parameter_that_no_forward_gives_a_shape_is_refused() -> None:
    model = nn.Linear(1, 1)
    model.register_parameter("extra", nn.UninitializedParameter())
    with (
        updater_of(model, devices=2) as updater,
        pytest.raises(ValueError, match="must have parameters of known shapes, got an uninitialized 'extra'"),
    ):
        updater.update()


def test_a_model_that_writes_its_parameters_in_forward_is_refused() -> None:
    """Replicas share their memory, so the write would be seen by shards that run at the same time."""
    model = nn.Sequential(nn.Embedding(5, 2, max_norm=0.1), nn.Flatten(), nn.Linear(2, 1))
    tokens = torch.tensor([[0], [1], [2], [3]])
    before = ls.digest(model)
    with (
        updater_of(model, tokens, devices=2) as updater,
        pytest.raises(ValueError, match=r"`model` must not write to its parameters in forward"),
    ):
        updater.update()
    assert ls.digest(model) == before


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_gradient_that_counts_indices_in_the_batch_needs_one_shard(num_shards: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 2, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(2, 1)).double()
    plain, tokens = copy.deepcopy(model), torch.tensor([[0], [1], [0], [3]])
    with updater_of(model, tokens, num_shards=num_shards, loss_fn=lambda net, x: net(x).mean()) as updater:
        if num_shards > 1:
            before = ls.digest(model)
            with pytest.raises(ValueError, match=r"scale_grad_by_freq=True at '0'.*num_shards=1"):
                updater.update()
            assert ls.digest(model) == before
        else:
            updater.compute_gradients(tokens)
            plain(tokens).mean().backward()
            assert torch.equal(model[0].weight.grad, plain[0].weight.grad)


def test_halves_out_of_order_are_refused() -> None:
    with finalized(updater_for(CONVNET, Placement(2), num_shards=5)) as updater:
        with pytest.raises(ls.OrderError):
            updater.apply_gradients()
        updater.compute_gradients(ls.collate(updater.get_iterator().peek()))
        updater.apply_gradients()
        with pytest.raises(ls.OrderError):
            updater.apply_gradients()


def test_an_update_after_the_end_says_so() -> None:
    model = MLP.model()
    iterator = ls.BatchIterator(MLP.data(), 23, repeat=False)
    with finalized(construct(model=model, iterator=iterator, loss_fn=cross_entropy)) as updater:
        updater.update()
        with pytest.raises(StopIteration, match=r"has ended after 1 epochs and 1 updates\. End the loop") as caught:
            updater.update()
        assert isinstance(caught.value, ls.EndOfDataError)
        assert updater.iteration == 1


@pytest.mark.filterwarnings("ignore:The calling thread is inside of")  # the mode that plays the accelerator
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_on_an_accelerator_has_arrived_before_a_cpu_reads_it(accumulate: int) -> None:
    batches = [(MLP.data()[start : start + 7]) for start in (0, 7, 14)]

    def train_on(data: list[Any]) -> str:
        model = MLP.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"loss_fn": cross_entropy, "num_shards": 3, "accumulate": accumulate}
        with finalized(
            construct(iterator=ls.IterableBatches(data), model=model, optimizer=optimizer, **options)
        ) as updater:
            updater.update()
        return ls.digest(model)

    wanted = train_on(batches)
    with LateCopies() as copies:
        there = [tuple(copies.on_accelerator(field) for field in batch) for batch in batches]
        assert train_on(there) == wanted
    assert copies.waits == [True] * len(copies.waits)
    # The audit of the first update cuts one shard, with its target, once more, and once for parts of it.
    assert len(copies.waits) == 3 * 2 * accumulate + 2 + 2


@pytest.mark.parametrize("batch_dim", [0, {"0": 0, "1['y']": 0}])
@pytest.mark.parametrize("split", ["contiguous", "strided"])
def test_values_beside_tensors_are_those_of_the_shard(split: Any, batch_dim: Any) -> None:
    x = torch.arange(7.0)[:, None]
    names = [f"sample {index}" for index in range(7)]
    # As torch's default_collate returns pairs of strings, and what a collate function may add of its own.
    batch = (x, {"y": x, "names": names, "pairs": [tuple(names), tuple(names)]}, x[:, 0].numpy(), (["a", "b"], 0.5))
    seen: list[str] = []

    def loss_fn(model: nn.Module, x: torch.Tensor, more: Any, array: Any, rest: Any) -> torch.Tensor:
        expected = [f"sample {int(value)}" for value in x[:, 0]]
        assert list(more["names"]) == expected
        assert [list(each) for each in more["pairs"]] == [expected, expected]
        assert array.tolist() == x[:, 0].tolist()
        assert rest == (["a", "b"], 0.5)
        seen.extend(expected)
        return model(x).mean()

    model = nn.Linear(1, 1)
    with updater_of(model, devices=2, num_shards=3, loss_fn=loss_fn, split=split, batch_dim=batch_dim) as updater:
        updater.compute_gradients(batch)
    assert sorted({*seen}) == names


@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_tensors_that_cannot_be_cut_are_refused(kind: str) -> None:
    x = torch.eye(4)
    batch = x.to_sparse() if kind == "sparse" else torch.nested.nested_tensor(list(x), layout=torch.jagged)
    named = "one with layout torch.sparse_coo" if kind == "sparse" else "a nested tensor"
    model = nn.Linear(4, 1)
    with updater_of(model, num_shards=2, loss_fn=lambda model, x: model(x).mean()) as updater:
        with pytest.raises(ValueError, match=f"`batch` must hold dense tensors to be cut into shards, got {named}"):
            updater.compute_gradients((batch,))
        updater.compute_gradients((x,))


@pytest.mark.parametrize("where", ["step function", "dataset", "converter"])
def test_an_iterator_of_ones_own_that_ends_is_not_the_end_of_the_data(where: str) -> None:
    own = iter(range(NUM_OWN))

    class Data(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if where == "dataset":
                next(own)
            return super().__getitem__(index)

    def convert(samples: Any, device: torch.device) -> Any:
        if where == "converter":
            next(own)
        return ls.collate(samples, device)

    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        next(own)
        updater.compute_gradients(batch)
        updater.apply_gradients()

    model = nn.Linear(3, 2)
    updater = ls.ParallelUpdater(
        ls.BatchIterator(Data(torch.randn(12, 3), torch.arange(12) % 2), 6),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"],
        num_shards=2,
        converter=convert,
        loss_fn=ls.supervised(functional.cross_entropy),
        step_fn=step if where == "step function" else None,
    )
    with pytest.raises(RuntimeError, match=f"{where}.* raised StopIteration, which is not the end of the training"):
        _update_until_it_raises(updater)
    updater.finalize()


def _update_until_it_raises(updater: ls.ParallelUpdater) -> None:
    for _ in range(NUM_OWN + 1):
        updater.update()


def test_an_iterator_of_the_updater_that_ends_in_a_step_is_the_end_of_the_data() -> None:
    model, data = nn.Linear(3, 2), TensorDataset(torch.randn(12, 3), torch.arange(12) % 2)

    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        updater.next_batch("other")
        updater.compute_gradients(batch)
        updater.apply_gradients()

    updater = ls.ParallelUpdater(
        {"main": ls.BatchIterator(data, 6), "other": ls.BatchIterator(data, 6, repeat=False)},
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"],
        num_shards=2,
        loss_fn=ls.supervised(functional.cross_entropy),
        step_fn=step,
    )
    for _ in range(2):
        updater.update()
    with pytest.raises(StopIteration):
        updater.update()
    updater.finalize()
