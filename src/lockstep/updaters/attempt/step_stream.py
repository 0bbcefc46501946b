"""Open the random stream of an update for what draws after its shards: optimizers, their hooks, and tensor hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from lockstep.errors import RandomStreamWarning, warn
from lockstep.streams import DEFAULT_GENERATOR_LOCK, STEP, DefaultStream, moved, stream_seed, substream
from lockstep.updaters.attempt.attempt import Attempt
from lockstep.updaters.detectors import generator_states, warn_of_steps


@dataclass(slots=True)
class StepStream:
    """The stream of what an update draws in the calling thread: the same on every rank, placement and after a resume.

    It is opened only where code runs that may draw, because opening it takes some 5 µs.

    Args:
        device: The device whose generator is seeded, beside that of the CPU.
        seed: The seed of the run.
        first_stream: Returns the position of the first stream of the current update.
        is_first: Returns whether the current update is one of the first, in which other generators are watched.
    """

    device: torch.device
    seed: int
    first_stream: Callable[[], int]
    is_first: Callable[[], bool]
    _has_warned: bool = False
    _is_open: bool = False

    @contextmanager
    def opened(self, attempt: Attempt | None = None, functions: Sequence[object] = ()) -> Iterator[None]:
        """Open the stream of this update, or continue it: inside of itself, and where the attempt has left it.

        Args:
            attempt: The attempt that draws; None for a step function.
            functions: What may draw from another generator.
        """
        if self._is_open:
            with self.watching(functions):
                yield
            return
        # The first audit also looks at what steps.
        if attempt is not None and attempt.audit is not None and attempt.gradient_context.at_start:
            warn_of_steps(functions)
        # Not during a step function, which waits for other ranks.
        lock = nullcontext() if attempt is None else DEFAULT_GENERATOR_LOCK
        with lock, DefaultStream(self.device) as stream:
            if attempt is None or attempt.stream_position is None:
                seed = stream_seed(self.seed, substream(STEP) + self.first_stream())
                # Gradients that wait for their steps together have hooks that draw different numbers.
                computation = 0 if attempt is None else attempt.request.computation
                stream.seed(stream_seed(seed, computation) if computation else seed)
            else:
                stream.resume(attempt.stream_position)
            self._is_open = True
            try:
                with self.watching(functions):
                    yield
            finally:
                self._is_open = False
                if attempt is not None:
                    attempt.stream_position = stream.position()

    @contextmanager
    def watching(self, functions: Iterable[object]) -> Iterator[None]:
        """Warn once if functions draw from a generator whose state is not saved, in the first updates.

        Args:
            functions: What may draw from another generator.
        """
        if not self.is_first() or self._has_warned:
            yield
            return
        before = generator_states(functions)
        yield
        names = moved(before, generator_states(functions))
        if names and not self._has_warned:
            self._has_warned = True
            warn(
                f"The optimizer, a hook, the step function or a BatchLoss drew from {' and '.join(names)}. A saved "
                "state does not hold the generator, so that a resumed run would draw other numbers. Draw from torch "
                "instead, without `generator=`: its random stream belongs to the update. Or create a generator in the "
                "step, seeded from torch: random.Random(torch.randint(2**31, ()).item()).",
                RandomStreamWarning,
            )
