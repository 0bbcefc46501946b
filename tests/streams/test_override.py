"""The override leaves no trace, changes nothing outside of streams, and says why when it cannot be had."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lockstep.errors import LockstepError, OrderError
from lockstep.streams import DefaultGeneratorGuard, StreamOverride, StreamOverrideError, shard_stream
from lockstep.streams.override import random_kernels


def kernels() -> dict[str, str]:
    """Say which kernels stand behind every random operator."""
    return {name: torch._C._dispatch_dump(f"aten::{name}") for name in random_kernels()}


def state_functions() -> list[object]:
    """List what stands behind every name that the override may touch."""
    modules = (torch, torch.random, torch.cuda, torch.cuda.random)
    return [value for module in modules for name, value in sorted(vars(module).items()) if "seed" in name] + [
        torch.random.default_generator,
        torch.default_generator,
        torch.get_rng_state,
        torch.set_rng_state,
        torch.random.fork_rng,
    ]


def stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def _everything_as_before() -> Iterator[None]:
    before = kernels(), state_functions(), set(torch.library._impls)
    yield
    assert (kernels(), state_functions(), set(torch.library._impls)) == before


def test_it_leaves_no_trace() -> None:
    before = kernels()
    owner = StreamOverride()
    assert kernels() == before, "a handle alone changes nothing"
    owner.install()
    assert owner.installed
    assert all(old != new for old, new in zip(before.values(), kernels().values(), strict=True))
    owner.remove()
    assert not owner.installed


def test_installing_and_removing_twice_changes_nothing() -> None:
    owner = StreamOverride()
    owner.install()
    installed = kernels()
    owner.install()
    assert kernels() == installed
    owner.remove()
    owner.remove()


def test_it_stays_while_anybody_owns_it() -> None:
    first, second = StreamOverride(), StreamOverride()
    first.install()
    first.install()
    second.install()
    first.remove()
    assert (first.installed, second.installed) == (False, True)
    with shard_stream(3):
        assert torch.equal(torch.rand(3), torch.rand(3, generator=stream(3)))
    second.remove()


def test_it_goes_with_an_exception() -> None:
    with pytest.raises(KeyError), StreamOverride(), shard_stream(1), shard_stream(2):
        raise KeyError
    with StreamOverride():
        assert torch.random.initial_seed() == torch.default_generator.initial_seed()


def test_it_warns_of_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with StreamOverride(), shard_stream(1):
            torch.rand(3)
    assert caught == []


def test_owners_in_many_threads(in_threads: Callable[[list[Callable[[], None]]], list[None]]) -> None:
    together = threading.Barrier(8)

    def own() -> None:
        together.wait()
        for _ in range(3):
            with StreamOverride() as owner:
                assert owner.installed

    in_threads([own] * 8)


def test_nothing_changes_outside_of_streams(override: StreamOverride, bits: Callable[[object], object]) -> None:
    def draw() -> list[object]:
        torch.manual_seed(5)
        drawn: list[object] = [torch.rand(3), torch.nn.functional.dropout(torch.ones(9))]
        state = torch.get_rng_state()
        drawn += [torch.rand(3, generator=generator) for generator in (None, torch.default_generator, stream(8))]
        torch.set_rng_state(state)
        return [*drawn, torch.initial_seed(), torch.randn(3), torch.default_generator.get_state()]

    with_override = draw()
    override.remove()
    assert bits(with_override) == bits(draw())


@pytest.mark.usefixtures("override")
def test_streams_nest() -> None:
    outer, inner = stream(1), stream(2)
    with shard_stream(1):
        drawn = [torch.rand(3)]
        with shard_stream(2):
            nested = [torch.rand(3), torch.rand(3)]
        drawn.append(torch.rand(3))
        with shard_stream(2):
            again = torch.rand(3)
        drawn.append(torch.rand(3))
    assert all(torch.equal(values, torch.rand(3, generator=outer)) for values in drawn)
    assert all(torch.equal(values, torch.rand(3, generator=inner)) for values in nested)
    assert torch.equal(again, nested[0])


@pytest.mark.usefixtures("override")
def test_one_stream_object_can_be_entered_again() -> None:
    shard = shard_stream(4)
    with shard:
        first = torch.rand(3)
        with shard:
            assert torch.equal(torch.rand(3), first)
        assert not torch.equal(torch.rand(3), first)


@pytest.mark.usefixtures("override")
def test_a_stream_belongs_to_its_thread(
    in_threads: Callable[[list[Callable[[], Tensor]]], list[Tensor]],
) -> None:
    torch.manual_seed(6)
    with shard_stream(1):
        (elsewhere,) = in_threads([lambda: torch.rand(3)])
    assert torch.equal(elsewhere, torch.rand(3, generator=stream(6)))


@pytest.mark.usefixtures("override")
def test_state_functions_act_on_the_stream() -> None:
    guard = DefaultGeneratorGuard()
    with shard_stream(7):
        assert torch.initial_seed() == torch.random.initial_seed() == 7
        state = torch.get_rng_state()
        first = torch.rand(3)
        torch.random.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            assert torch.initial_seed() == 9
            assert torch.equal(torch.rand(3), torch.rand(3, generator=stream(9)))
        assert torch.equal(torch.rand(3), torch.rand(6, generator=stream(7))[3:])
        assert torch.seed() == torch.initial_seed()
    assert not guard.moved()


def test_functions_taken_before_act_on_the_stream_too() -> None:
    take, put, seed = torch.get_rng_state, torch.random.set_rng_state, torch.manual_seed
    with StreamOverride(), shard_stream(7):
        state = take()
        first = torch.rand(3)
        put(state)
        assert torch.equal(torch.rand(3), first)
        seed(9)
        assert torch.equal(torch.rand(3), torch.rand(3, generator=stream(9)))


@pytest.mark.usefixtures("override")
def test_the_stand_in_can_be_passed_as_a_generator() -> None:
    torch.manual_seed(3)
    outside = torch.rand(3, generator=torch.random.default_generator)
    assert torch.equal(outside, torch.rand(3, generator=stream(3)))
    with shard_stream(4):
        inside = torch.rand(3, generator=torch.random.default_generator)
        poisson = torch.poisson(torch.ones(9), torch.random.default_generator)
    same = stream(4)
    assert torch.equal(inside, torch.rand(3, generator=same))
    assert torch.equal(poisson, torch.poisson(torch.ones(9), same))
    assert isinstance(torch.random.default_generator, torch.Generator)
    assert torch.random.default_generator.device == torch.device("cpu")


def test_a_name_that_somebody_changed_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, StreamOverride():
        ours = torch.cuda.manual_seed_all

        def theirs(seed: int) -> None:
            ours(seed)

        patch.setattr(torch.cuda, "manual_seed_all", theirs)
        original = vars(torch.cuda.random)["manual_seed_all"].__wrapped__
        StreamOverride().remove()
    # Now theirs is undone to ours, which is left behind, as nobody could tell; it calls the original.
    assert torch.cuda.manual_seed_all is ours
    torch.cuda.manual_seed_all(1)
    torch.cuda.manual_seed_all = original


@pytest.mark.usefixtures("override")
def test_kernels_of_others_stay_in_charge() -> None:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl("uniform_", lambda tensor, *_, **__: tensor.fill_(0.25), "CPU")
    try:
        with shard_stream(1):
            assert torch.rand(3).tolist() == [0.25] * 3
    finally:
        library._destroy()


def test_it_says_why_it_cannot_be_installed() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("poisson", lambda tensor, _: tensor, "BackendSelect")
    before = kernels(), state_functions()
    owner = StreamOverride()
    try:
        with pytest.raises(StreamOverrideError, match="another library has registered aten::poisson") as caught:
            owner.install()
        assert isinstance(caught.value, LockstepError)
        assert not owner.installed
        assert (kernels(), state_functions()) == before
    finally:
        library._destroy()
    with owner:
        assert owner.installed


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch._C, "_dispatch_keyset_full_after"),
        (torch.random, "default_generator"),
        (torch.cuda, "manual_seed_all"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_torch_without_the_means_is_named(owner: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernels()
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        with pytest.raises(StreamOverrideError, match=rf"with torch .*: .*{name}.* Compute one shard at a time"):
            StreamOverride().install()
    assert kernels() == before


def test_a_stream_without_the_override_is_refused() -> None:
    with pytest.raises(OrderError, match="`StreamOverride` must be installed"), shard_stream(1):
        pass
    assert torch.initial_seed() == torch.default_generator.initial_seed()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_no_stream_has_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"^`seed` must lie in 0\.\.2\*\*32 - 1.* got {seed}\.$"):
        shard_stream(seed)


SCRIPT = """
import torch
names = ("aten::uniform_", "aten::bernoulli_.float")
before = [torch._C._dispatch_dump(name) for name in names], torch.random.default_generator
import lockstep.streams as streams
assert ([torch._C._dispatch_dump(name) for name in names], torch.random.default_generator) == before
owner = streams.StreamOverride()
owner.install()
with streams.shard_stream(3):
    torch.rand(3)
"""


def test_importing_changes_nothing_and_an_override_survives_the_exit() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
