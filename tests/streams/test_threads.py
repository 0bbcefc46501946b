"""Shards that several threads compute at once draw what they draw one at a time, checkpointed or not."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody knows
from torch.utils.checkpoint import checkpoint

from lockstep.errors import OrderError
from lockstep.streams import DefaultGeneratorGuard, DefaultStream, shard_stream, stream_seed
from lockstep.streams.state import DEFAULT_GENERATOR

SHARDS = [stream_seed(0, position) for position in range(8)]
InThreads = Callable[[list[Callable[[], list[Tensor]]]], list[list[Tensor]]]


@pytest.fixture
def _threads_change_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Model(nn.Module):
    """Dropout in its own layer, inside attention and between the layers of an LSTM; noise in user code."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.3, batch_first=True)
        self.remember = nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.remember(self.attend(inputs + torch.randn_like(inputs)))[0]
        return F.dropout(hidden, 0.3)


def gradients(run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """Compute one shard of a fixed model and input: its output and all gradients."""
    model = Model()
    for parameter in model.parameters():  # the same in every shard
        nn.init.constant_(parameter, 0.1)
    inputs = torch.linspace(-1, 1, 3 * 5 * 8).reshape(3, 5, 8).requires_grad_()
    output = run(model, inputs)
    output.square().sum().backward()
    return [
        output.detach(),
        *(tensor.grad for tensor in (inputs, *model.parameters()) if tensor.grad is not None),
    ]


def plain(model: nn.Module, inputs: Tensor) -> Tensor:
    output: Tensor = model(inputs)
    return output


def checkpointed(model: nn.Module, inputs: Tensor, *, use_reentrant: bool) -> Tensor:
    # What is drawn between forward and recomputation would be drawn again if the state were not restored.
    output: Tensor = checkpoint(model, inputs, use_reentrant=use_reentrant)
    return output * torch.rand(1)


RUNS = {
    "plain": plain,
    "checkpointed, reentrant": functools.partial(checkpointed, use_reentrant=True),
    "checkpointed": functools.partial(checkpointed, use_reentrant=False),
}


def serially(run: Callable[[nn.Module, Tensor], Tensor]) -> list[list[Tensor]]:
    """Compute the shards one at a time, through the default generator."""
    results = []
    with DefaultStream("cpu") as stream:
        for seed in SHARDS:
            stream.seed(seed)
            results.append(gradients(run))
    return results


def in_stream(seed: int, run: Callable[[nn.Module, Tensor], Tensor], start: threading.Barrier) -> list[Tensor]:
    start.wait(timeout=60)
    with shard_stream(seed):
        return gradients(run)


def jobs(run: Callable[[nn.Module, Tensor], Tensor]) -> list[Callable[[], list[Tensor]]]:
    start = threading.Barrier(len(SHARDS))
    return [functools.partial(in_stream, seed, run, start) for seed in SHARDS]


@pytest.mark.usefixtures("override", "_threads_change_often")
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_shards_at_once_equal_shards_one_at_a_time(
    run: Callable[[nn.Module, Tensor], Tensor], in_threads: InThreads, bits: Callable[[object], list[object]]
) -> None:
    guard = DefaultGeneratorGuard()
    threaded = in_threads(jobs(run))
    assert not guard.moved()
    serial = serially(run)
    assert bits(threaded) == bits(serial)
    assert bits(serial[0]) != bits(serial[1]), "shards have streams of their own"


@pytest.mark.usefixtures("override")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_go_wrong_without_thread_aware_state(
    use_reentrant: bool, monkeypatch: pytest.MonkeyPatch, bits: Callable[[object], list[object]]
) -> None:
    """Show that the law above can fail: the recomputation then draws other masks, and nobody notices."""
    run = functools.partial(checkpointed, use_reentrant=use_reentrant)
    with shard_stream(SHARDS[0]):
        right = gradients(run)
    guard = DefaultGeneratorGuard()
    with monkeypatch.context() as patch, shard_stream(SHARDS[0]):
        patch.setattr(torch.random, "default_generator", DEFAULT_GENERATOR)
        wrong = gradients(run)
    assert not guard.moved()
    assert bits(wrong[0]) == bits(right[0])
    assert bits(wrong[1:]) != bits(right[1:])


@pytest.mark.usefixtures("override")
def test_threads_that_share_a_generator_get_each_others_numbers(
    in_threads: InThreads, bits: Callable[[object], list[object]]
) -> None:
    """Show that streams are needed: two threads that seed the default generator in turn."""
    seeded, drawn = threading.Event(), threading.Event()

    def first() -> list[Tensor]:
        torch.manual_seed(1)
        seeded.set()
        assert drawn.wait(timeout=60)
        return [torch.rand(3)]

    def second() -> list[Tensor]:
        assert seeded.wait(timeout=60)
        torch.manual_seed(2)
        values = [torch.rand(3)]
        drawn.set()
        return values

    values = in_threads([first, second])
    alone = [[torch.rand(3, generator=torch.Generator().manual_seed(seed))] for seed in (1, 2)]
    assert bits(values[1]) == bits(alone[1])
    assert bits(values[0]) != bits(alone[0])


@pytest.mark.usefixtures("override")
def test_the_guard_notices_a_thread_outside_of_any_stream(
    in_threads: Callable[[list[Callable[[], Tensor]]], list[Tensor]],
) -> None:
    guard = DefaultGeneratorGuard()
    with shard_stream(1):
        torch.rand(3)
        torch.empty(3).uniform_(generator=torch.default_generator)  # redirected
    assert not guard.moved()
    in_threads([lambda: torch.empty(3).uniform_()])
    assert guard.moved()
    guard.restore()
    assert not guard.moved()


@pytest.mark.usefixtures("override")
def test_the_guard_notices_the_default_generator_seeded_directly() -> None:
    guard = DefaultGeneratorGuard()
    with shard_stream(1):
        DEFAULT_GENERATOR.manual_seed(5)
    assert guard.moved()


def test_the_guard_notices_half_a_pair_of_normal_numbers() -> None:
    """A normal number is drawn in pairs; the second draw only takes what the first has left."""
    torch.default_generator.manual_seed(5)
    torch.randn(1, dtype=torch.float64)
    guard = DefaultGeneratorGuard()
    torch.randn(1, dtype=torch.float64)
    assert guard.moved()


def test_default_stream_puts_the_generator_back(bits: Callable[[object], list[object]]) -> None:
    torch.manual_seed(11)
    torch.randn(1)
    guard = DefaultGeneratorGuard()
    with DefaultStream("cpu") as stream:
        stream.seed(5)
        first = torch.rand(3)
        stream.seed(5)
        assert bits(torch.rand(3)) == bits(first)
    assert not guard.moved()
    with pytest.raises(RuntimeError, match="size"), stream:
        torch.rand(3) + torch.rand(4)
    assert not guard.moved()


def test_default_stream_without_the_cpu_leaves_it_alone() -> None:
    guard = DefaultGeneratorGuard()
    with DefaultStream("cpu", cpu=False) as stream:
        stream.seed(5)
    assert not guard.moved()


def test_default_stream_refuses_calls_out_of_order() -> None:
    stream = DefaultStream("cpu")
    with pytest.raises(OrderError, match="must be called inside"):
        stream.seed(1)
    with stream, pytest.raises(OrderError, match="must be left before"), stream:
        pass
    with pytest.raises(OrderError, match="must be called inside"):
        stream.seed(1)


def test_default_stream_refuses_what_it_does_not_know() -> None:
    rule = "must be CPUs or accelerators with default generators"
    with pytest.raises(ValueError, match=rf"^`devices` {rule}, got meta\.$"):
        DefaultStream("meta")
    guard = DefaultGeneratorGuard()
    with DefaultStream("cpu") as stream, pytest.raises(ValueError, match="`seed` must lie in"):
        stream.seed(2**32)
    assert not guard.moved()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_default_stream_borrows_the_generator_of_its_device(bits: Callable[[object], list[object]]) -> None:
    before = torch.cuda.get_rng_state()
    with DefaultStream("cuda") as stream:
        stream.seed(5)
        first = torch.rand(3, device="cuda"), torch.rand(3)
        stream.seed(5)
        assert bits((torch.rand(3, device="cuda").cpu(), torch.rand(3))) == bits((first[0].cpu(), first[1]))
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("override")
def test_seeding_in_a_stream_seeds_the_device_too(bits: Callable[[object], list[object]]) -> None:
    torch.cuda.init()
    with DefaultStream("cuda", cpu=False) as stream, shard_stream(5):
        stream.seed(5)
        torch.manual_seed(9)
        first = torch.rand(3, device="cuda").cpu(), torch.rand(3)
        torch.manual_seed(9)
        assert bits((torch.rand(3, device="cuda").cpu(), torch.rand(3))) == bits(first)
