"""The first update finds what the threads of several devices would change for each other."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import lockstep as ls
from lockstep.replicas.pool import probes

X = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (32,), generator=torch.Generator().manual_seed(1))
Loss = Callable[..., torch.Tensor]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


def updater_of(model: nn.Module, loss_fn: Any, devices: int = 2, **options: Any) -> ls.ParallelUpdater:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(X, Y)] * 3
    return ls.ParallelUpdater(batches, optimizer, model, devices=devices, num_shards=4, loss_fn=loss_fn, **options)


def updated(updater: ls.ParallelUpdater, number: int = 3) -> int:
    """Make updates, and return their number."""
    for _ in range(number):
        updater.update()
    updater.finalize()
    return updater.iteration


# What is shared ----------------------------------------------------------------------------------------


def swapped_weights() -> Loss:
    base = network().requires_grad_(False).eval()
    weights = {name: each.detach() for name, each in network().named_parameters()}

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        del y
        with torch.no_grad():
            target = torch.func.functional_call(base, weights, (x,)).softmax(1)
        return functional.cross_entropy(model(x), target)

    return loss_fn


def mode_of_a_teacher() -> Loss:
    teacher = nn.Sequential(network(), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3)).requires_grad_(False)

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        del y
        before = teacher.training
        teacher.eval()
        with torch.no_grad():
            target = teacher(x)
        teacher.train(before)
        return functional.mse_loss(model(x), target)

    return loss_fn


class Scratch(nn.Module):
    def forward(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.weights = torch.tensor([1.0, 2.0, 4.0])[y]
        return self.weighted(functional.cross_entropy(scores, y, reduction="none"))

    def weighted(self, losses: torch.Tensor) -> torch.Tensor:
        return (losses * self.weights).mean()


def attribute_of_a_criterion() -> Any:
    return ls.supervised(Scratch())


def preallocated_tensor() -> Loss:
    memory = torch.empty(32, 5)

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch.mul(x, 2, out=memory[: len(x)])
        return functional.cross_entropy(model(x) + memory[: len(x)].mean(), y) * memory[: len(x)].std()

    return loss_fn


def values_of_parameters() -> Loss:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = [each.detach().clone() for each in model.parameters()]
        for each in model.parameters():
            each.data.copy_(0.5 * each.detach())
        with torch.no_grad():
            target = model(x).softmax(1)
        for each, value in zip(model.parameters(), kept, strict=True):
            each.data.copy_(value)
        return functional.cross_entropy(model(x), target) + functional.cross_entropy(model(x), y)

    return loss_fn


def seed_of_the_process() -> Loss:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        random.seed(0)
        scores = model(x)
        return functional.cross_entropy(scores * torch.tensor([random.random() for _ in range(3)]), y)  # noqa: S311

    return loss_fn


@contextmanager
def kept_switches() -> Iterator[None]:
    """Undo what a race leaves behind."""
    state = random.getstate()
    yield
    random.setstate(state)


SHARED = [
    *(swapped_weights, mode_of_a_teacher, attribute_of_a_criterion, preallocated_tensor, values_of_parameters),
    seed_of_the_process,
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", SHARED)
@pytest.mark.parametrize("devices", [2, 3])
def test_what_threads_share_is_refused_before_anything_has_changed(make: Callable[[], Any], devices: int) -> None:
    torch.manual_seed(0)
    model = network()
    before = ls.digest(model)
    updater = updater_of(model, make(), devices)
    # Weights that end with other values have an error of their own.
    expected = r"in turn after each operation, and .*share|must not write to its parameters"
    with kept_switches(), pytest.raises((ls.OrderError, ValueError), match=expected):
        updater.update()
    updater.finalize()
    assert (updater.iteration, ls.digest(model)) == (0, before)


class Attention(nn.Module):
    """Chooses its kernel for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 12), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.body(x[:, None, :, None]).chunk(3, dim=-1)
        with sdpa_kernel(SDPBackend.MATH):
            found = functional.scaled_dot_product_attention(query, key, value)
        return self.head(found.mean((1, 2)))


def test_a_switch_of_the_process_in_forward_is_refused() -> None:
    torch.manual_seed(0)
    flash = torch.backends.cuda.flash_sdp_enabled()
    updater = updater_of(Attention(), ls.supervised(functional.cross_entropy))
    try:
        with pytest.raises(ls.OrderError, match=r"sdpa_kernel"):
            updater.update()
    finally:
        updater.finalize()
        for enable in ("flash", "math", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{enable}_sdp")(flash)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", SHARED)
def test_one_device_shares_nothing(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    with kept_switches():
        assert updated(updater_of(network(), make(), 1, audit_every=0)) == 3


def test_weights_that_begin_alike_are_found_in_a_later_one_of_the_first_updates() -> None:
    torch.manual_seed(0)
    model = network()
    shadow = [each.detach().clone() for each in model.parameters()]

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = [each.detach().clone() for each in model.parameters()]
        for each, value in zip(model.parameters(), shadow, strict=True):
            each.data.copy_(value)
        with torch.no_grad():
            target = model(x).softmax(1)
        for each, value in zip(model.parameters(), kept, strict=True):
            each.data.copy_(value)
        return functional.cross_entropy(model(x), target) + functional.cross_entropy(model(x), y)

    updater = updater_of(model, loss_fn)
    updater.update()
    with pytest.raises((ls.OrderError, ValueError), match=r"in turn after each operation|must not write"):
        updated(updater, 2)
    updater.finalize()


def test_a_switch_that_is_left_changed_is_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = torch.backends.cuda.math_sdp_enabled()
            torch.backends.cuda.enable_math_sdp(not before)
            x = self.body(x)
            torch.backends.cuda.enable_math_sdp(before)
            return x

    enabled = torch.backends.cuda.math_sdp_enabled()
    updater = updater_of(Half(), ls.supervised(functional.cross_entropy))
    try:
        with pytest.raises(
            ls.OrderError, match=r"torch.backends.cuda.math_sdp_enabled\(\) has another value than before"
        ):
            updater.update()
    finally:
        updater.finalize()
        torch.backends.cuda.enable_math_sdp(enabled)


def work(make: Callable[[], Any]) -> tuple[str, int]:
    torch.manual_seed(0)
    updater = updater_of(network(), make(), 2, communicator=ls.find_communicator())
    try:
        updater.update()
    except (ls.LockstepError, ls.PeerError) as error:
        return f"{type(error).__name__}: {error}", updater.iteration
    return "", updater.iteration


@pytest.mark.slow
def test_each_rank_looks_at_its_own_devices() -> None:
    for text, updates in ls.launch(partial(work, attribute_of_a_criterion), num_processes=2):
        assert "share" in text
        assert updates == 0


# What is not -------------------------------------------------------------------------------------------


def alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def member(make: Callable[[], nn.Module]) -> nn.Module:
    model = network()
    model.add_module("member", make().requires_grad_(False))
    return model


def own_base(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    base = model.get_submodule("member")
    weights = {name: 2 * each for name, each in base.named_parameters()}
    with torch.no_grad():
        base.eval()
        target = torch.func.functional_call(base, weights, (x,)).softmax(1)
        base.train()
    return alone(nn.Sequential(*[*model.children()][:-1]), x, y) + functional.cross_entropy(model[0](x)[:, :3], target)


COMPILED = torch.compile(lambda out, y: functional.cross_entropy(out * 1.5, y) + out.square().mean(), backend="eager")


def compiled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return COMPILED(model(x), y)


def test_a_precision_that_the_older_functions_cannot_express_is_accepted() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert updated(updater_of(network(), alone)) == 3
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


LOCK = threading.Lock()


def locked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Protects what it shares."""
    with LOCK:
        CRITERION.weights = torch.ones(3)[y]
        return CRITERION.weighted(functional.cross_entropy(model(x), y, reduction="none"))


CRITERION = Scratch()


@pytest.mark.filterwarnings("error")
@pytest.mark.each_value
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    ("model", "loss_fn"),
    [
        (network, alone),
        (partial(member, network), own_base),
        (network, locked),
        # The compiler reads `grad` of its inputs.
        pytest.param(network, compiled, marks=pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")),
    ],
    ids=["nothing", "member", "lock", "compiled"],
)
def test_what_threads_do_not_share_is_accepted(
    model: Callable[[], nn.Module], loss_fn: Loss, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "PATIENCE", 0.2)
    digests = []
    for each in (1, devices):
        torch.manual_seed(0)
        net = model()
        updated(updater_of(net, loss_fn, each))
        digests.append(ls.digest(net))
    assert len(set(digests)) == 1


def test_the_number_of_calls() -> None:
    """Four times for each of two shards, and once for the audited one, in the audits of the first updates.

    In the first of them also once for the audited shard and for each of four parts of it.
    """
    for devices, audit_every, extra in [(1, None, 6), (2, None, 14), (3, None, 14), (2, 0, 0), (2, 2, 23)]:
        calls: list[int] = []

        def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor, calls: list[int] = calls) -> torch.Tensor:
            calls.append(len(x))
            return alone(model, x, y)

        updated(updater_of(network(), loss_fn, devices, audit_every=audit_every))
        assert len(calls) == 3 * 4 + extra, (devices, audit_every)


def test_the_turns_are_the_same_every_time() -> None:
    def order(lead: int) -> list[int]:
        turns, found = probes.Turns([0, 1], lead), list[int]()

        def work(number: int) -> None:
            tensor = torch.ones(1)
            for _ in range(4):
                found.append(number)
                tensor.add(1)

        threads = [threading.Thread(target=turns.run, args=(each, partial(work, each))) for each in (0, 1)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return found

    assert [order(0) for _ in range(3)] == [[0, 1, 0, 1, 0, 1, 0, 1]] * 3
    assert order(2) == [0, 0, 0, 1, 0, 1, 1, 1]


def test_a_thread_does_not_wait_for_one_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "PATIENCE", 0.05)
    turns, lock, done = probes.Turns([0, 1], 0), threading.Lock(), list[int]()

    def work(number: int) -> None:
        with lock:
            torch.ones(1).add(1)
            torch.ones(1).add(1)
        done.append(number)

    threads = [threading.Thread(target=turns.run, args=(each, partial(work, each))) for each in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert sorted(done) == [0, 1]
