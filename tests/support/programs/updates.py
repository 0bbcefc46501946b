"""What two processes do in the tests of updates over ranks; each program runs on both."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.optim.hooks import WeightDecay
from tests.support import gan as several
from tests.support.runs import cross_entropy, finalized, state_digest, updater_for
from tests.support.workloads import CONVNET, MLP

NUM_UPDATES = 4
BAD_RANK = 1


def rank() -> int:
    return ls.find_communicator().rank


def outcome(action: Callable[[], Any]) -> list[str]:
    """Name the exception that an action raises, with its message."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - what is raised is the answer
        return [type(error).__name__, str(error), getattr(error, "subject", "")]
    return ["nothing", "", ""]


class Trap:
    """A loss function that does something on one rank, once it is armed."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action
        self.armed = False

    def __call__(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.armed and rank() == BAD_RANK:
            self.armed = False
            self.action()
        return cross_entropy(model, x, target)


def boom() -> None:
    raise ValueError("boom")


def interrupt() -> None:
    """Send Ctrl-C to this process, and let Python see it."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


def undisturbed(**options: Any) -> str:
    with finalized(updater_for(CONVNET, num_shards=5, **options)) as updater:
        for _ in range(NUM_UPDATES):
            updater.update()
        return state_digest(updater)


def disturbed(action: Callable[[], Any]) -> dict[str, Any]:
    """Disturb the third update, and go on."""
    trap = Trap(action)
    with finalized(updater_for(CONVNET, num_shards=5, loss_fn=trap)) as updater:
        updater.update()
        updater.update()
        before = ls.digest(updater.state_dict())
        trap.armed = True
        raised = outcome(updater.update)
        after = ls.digest(updater.state_dict())
        trap.armed = False
        while updater.iteration < NUM_UPDATES:
            updater.update()
        return {"raised": raised, "unchanged": before == after, "end": state_digest(updater)}


def raising() -> dict[str, Any]:
    return disturbed(boom)


def interrupted() -> dict[str, Any]:
    with signals(signal.default_int_handler):
        return disturbed(interrupt)


def interrupted_and_going_on() -> dict[str, Any]:
    """Have a handler that only takes note, so that the shards left out must be computed anew."""
    seen: list[int] = []
    with signals(lambda number, _: seen.append(number)):
        return {**disturbed(interrupt), "seen": len(seen)}


@contextmanager
def signals(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Loads:
    """A dataset that draws random numbers, and writes down what is loaded in which process."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / f"rank {rank()}"
        self.fails = False

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fails:
            raise OSError(f"sample {index} is out of reach")
        with self.path.open("a") as file:
            file.write(f"{index} ")
        return torch.randn(6), torch.tensor(index % 3)


def loaded(folder: str, num_workers: int, accumulate: int) -> dict[str, Any]:
    """Say which samples were loaded, and what came of training on them."""
    dataset = Loads(folder)
    model = MLP.model()
    updater = ls.ParallelUpdater(
        ls.BatchIterator(dataset, 8, num_workers=num_workers, repeat=False),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"],
        num_shards=4,
        accumulate=accumulate,
        loss_fn=cross_entropy,
        audit_every=0,
    )
    with finalized(updater):
        for _ in range(2 // accumulate):
            updater.update()
        ended = outcome(updater.update)[0]
        return {"indices": dataset.path.read_text().split(), "end": state_digest(updater), "ended": ended}


def raising_data(folder: str) -> dict[str, Any]:
    """Fail to load a sample on one rank, once."""
    dataset = Loads(folder)
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = ls.BatchIterator(dataset, 8)
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=1, num_shards=4, loss_fn=cross_entropy)
    with finalized(updater):
        dataset.fails = rank() == BAD_RANK
        raised = outcome(updater.update)
        dataset.fails = False
        updater.update()
        return {"raised": raised, "end": state_digest(updater), "iteration": updater.iteration}


def raising_step(phase: str) -> dict[str, Any]:
    """Raise in a step function, between its computations."""
    armed = [False]

    def visit(name: str) -> None:
        if name == phase and armed[0] and rank() == BAD_RANK:
            boom()

    updater = several.gan(several.GanStep(visit))
    with finalized(updater):
        updater.update()
        before = several.snapshot(updater)
        armed[0] = True
        raised = outcome(updater.update)
        after = several.snapshot(updater)
        armed[0] = False
        updater.update()
        return {"raised": raised, "unchanged": before == after, "end": several.snapshot(updater)}


def gan_undisturbed() -> str:
    return several.run(several.gan(), 2)


def other_batch() -> list[str]:
    with finalized(updater_for(MLP, num_shards=5, batch_size=9)) as updater:
        inputs = torch.zeros(7 + rank(), 6), torch.zeros(7 + rank(), dtype=torch.int64)
        return outcome(lambda: updater.compute_gradients(inputs))


def other_end() -> list[str]:
    """Give the ranks iterators of different lengths."""
    model = MLP.model()
    batches = [(torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64))] * (3 - rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = ls.IterableBatches((batch for batch in batches), repeat=False)
    updater = ls.ParallelUpdater(source, optimizer, model, devices=1, num_shards=2, loss_fn=cross_entropy)
    with finalized(updater):
        updater.update()
        updater.update()
        return outcome(updater.update)


def other_update() -> list[str]:
    """Apply a gradient once more on one rank only."""
    with finalized(updater_for(MLP, num_shards=5)) as updater:
        updater.compute_gradients(updater.get_iterator().peek())
        if rank() == BAD_RANK:
            updater.apply_gradients()
        else:
            updater.get_optimizer("main").zero_grad()
        return outcome(updater.update)


def refused(**on_rank_1: Any) -> list[str]:
    """Give one rank another argument."""
    options: dict[str, Any] = {"num_shards": 5, **(on_rank_1 if rank() == BAD_RANK else {})}
    with finalized(updater_for(MLP, **options)) as updater:
        return outcome(updater.update)


def refused_rate() -> list[str]:
    with finalized(updater_for(MLP, num_shards=5)) as updater:
        if rank() == BAD_RANK:
            updater.get_optimizer("main").param_groups[0]["lr"] = 0.01
        return outcome(updater.update)


def refused_dropout() -> list[str]:
    model = nn.Sequential(MLP.model(), nn.Dropout(0.2 if rank() == BAD_RANK else 0.1))
    with finalized(updater_for(MLP, num_shards=5, model=model)) as updater:
        return outcome(updater.update)


def refused_criterion() -> list[str]:
    smoothing = 0.1 if rank() == BAD_RANK else 0.0
    supervised = ls.supervised(nn.CrossEntropyLoss(label_smoothing=smoothing))
    with finalized(updater_for(MLP, num_shards=5, loss_fn=supervised)) as updater:
        return outcome(updater.update)


def refused_switch() -> list[str]:
    """Allow float32 matrix products of less precision on one rank: other kernels."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if rank() == BAD_RANK else before)
    try:
        with finalized(updater_for(MLP, num_shards=5)) as updater:
            return outcome(updater.update)
    finally:
        torch.set_float32_matmul_precision(before)


def other_models(differing: str) -> dict[str, Any]:
    """Build the model from another seed on each rank."""
    torch.manual_seed(rank())
    model, chosen = CONVNET.build(), ls.find_communicator(differing_models=differing)
    with finalized(updater_for(CONVNET, model=model, num_shards=5, communicator=chosen)) as updater:
        raised = outcome(updater.update)
        return {"raised": raised, "end": state_digest(updater)}


def from_rank_0() -> str:
    """Train what rank 0 built, alone."""
    torch.manual_seed(0)
    model = CONVNET.build()
    with finalized(updater_for(CONVNET, model=model, num_shards=5)) as updater:
        updater.update()
        return state_digest(updater)


def flipped(what: str, every: int) -> dict[str, Any]:
    """Flip one bit of the state of one rank after three updates, and count the updates until it is seen."""
    communicator = ls.find_communicator(check_every=every)
    with finalized(updater_for(CONVNET, num_shards=5, communicator=communicator)) as updater:
        for _ in range(3):
            updater.update()
        model = updater.get_all_models()["main"]
        last = list(model.parameters())[-1]
        targets = {
            "parameter": last,
            "buffer": model[1].running_var,
            "momentum": updater.get_optimizer("main").state[last]["momentum_buffer"],
        }
        if rank() == BAD_RANK:
            targets[what].data.view(torch.int32).view(-1)[0] ^= 1 << 20  # not the last bit, which decay may round away
        for count in range(1, 2 * every + 1):
            raised = outcome(updater.update)
            if raised[0] != "nothing":
                return {"raised": raised, "count": count}
        return {"raised": raised, "count": -1}


def failing_hook() -> dict[str, Any]:
    """Raise in a hook of the optimizer's step on one rank: the ranks are no longer at one update."""
    model = MLP.model()
    optimizer = ls.CorrectedMomentumSGD(model.parameters(), lr=0.1)
    optimizer.add_hook(WeightDecay(1e-3))
    armed = [True]

    def hook(_: Any) -> None:
        if rank() == BAD_RANK and armed.pop():
            boom()

    optimizer.add_hook(hook, name="fails", timing="pre")
    data = TensorDataset(torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64))
    batches = ls.BatchIterator(data, 4)
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=1, num_shards=2, loss_fn=cross_entropy)
    with finalized(updater):
        return {"first": outcome(updater.update), "second": outcome(updater.update)}


def saved_and_loaded() -> dict[str, Any]:
    """Save in the middle, and load that into a fresh run."""
    with finalized(updater_for(CONVNET, num_shards=5)) as updater:
        for _ in range(3):
            updater.update()
        state = updater.state_dict()
        state = {**state, "models": {"main": {k: v.clone() for k, v in state["models"]["main"].items()}}}
        digest = ls.digest(state)
        with finalized(updater_for(CONVNET, num_shards=5)) as fresh:
            fresh.load_state_dict(state)
            while fresh.iteration < NUM_UPDATES:
                fresh.update()
            return {"state": digest, "end": state_digest(fresh)}


PROGRAMS: dict[str, Callable[[str], Any]] = {
    "undisturbed": lambda _: undisturbed(),
    "raising": lambda _: raising(),
    "interrupted": lambda _: interrupted(),
    "going on": lambda _: interrupted_and_going_on(),
    "loaded": lambda folder: loaded(folder, 0, 1),
    "raising data": raising_data,
    "gan": lambda _: gan_undisturbed(),
    **{f"raising at {phase}": lambda _, phase=phase: raising_step(phase) for phase in several.PHASES},
    "other batch": lambda _: other_batch(),
    "other end": lambda _: other_end(),
    "other update": lambda _: other_update(),
    "seed": lambda _: refused(seed=1),
    "shards": lambda _: refused(num_shards=6),
    "precision": lambda _: refused(precision="bf16"),
    "rate": lambda _: refused_rate(),
    "dropout": lambda _: refused_dropout(),
    "criterion": lambda _: refused_criterion(),
    "switch": lambda _: refused_switch(),
    "broadcast": lambda _: other_models("broadcast"),
    "refuse": lambda _: other_models("refuse"),
    **{
        f"flipped {what}, {every}": lambda _, what=what, every=every: flipped(what, every)
        for what, every in [
            ("parameter", 1),
            ("parameter", 4),
            ("momentum", 1),
            ("momentum", 4),
            ("buffer", 1),
        ]
    },
    "failing hook": lambda _: failing_hook(),
    "saved": lambda _: saved_and_loaded(),
}


def run_programs(folder: str) -> dict[str, Any]:
    """Run them all on this rank; what a program itself raises is its answer."""
    found: dict[str, Any] = {}
    for name, program in PROGRAMS.items():
        here = Path(folder) / name.replace(" ", "-")
        here.mkdir(exist_ok=True)
        found[name] = program(str(here))
    for num_workers, accumulate in ((0, 2), (1, 1), (1, 2)):
        here = Path(folder) / f"loaded-{num_workers}-{accumulate}"
        here.mkdir(exist_ok=True)
        found[f"loaded {num_workers} {accumulate}"] = loaded(str(here), num_workers, accumulate)
    return found
