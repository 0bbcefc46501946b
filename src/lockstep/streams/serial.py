"""Give shards their streams through the default generators, where one shard is computed at a time."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final

import torch

from lockstep.errors import OrderError
from lockstep.streams.seeds import SEEDS, check_seed

# One for the process, because the default generator is. Threads that would borrow it at once take turns.
ONE_BORROWER: Final = threading.RLock()


class DefaultStream:
    """Borrow the default generators for the shards of one update, and give them back as they were.

    Nothing in torch is changed, so every way to draw is covered. But the default CPU generator is one
    per process: use this in one thread at a time (`ONE_BORROWER`). Threads that each drive a CUDA device
    of their own take ``cpu=False`` for that device's generator, and a `shard_stream` for what they draw
    on the CPU.

    Args:
        *devices: Where the shards are computed; "cpu" or CUDA devices, whose generators are borrowed too.
        cpu: Whether to borrow the CPU's default generator.

    Raises:
        ValueError: A device is neither a CPU nor a CUDA device.

    Determinism: on a CPU, the bits of a `shard_stream` of the same seed.

    >>> before = torch.get_rng_state()
    >>> with DefaultStream("cpu") as stream:
    ...     for shard in range(2):
    ...         stream.seed(shard)
    ...         drawn = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """

    __slots__ = ("_cpu", "_devices", "_saved")

    def __init__(self, *devices: torch.device | str, cpu: bool = True) -> None:
        found = list(dict.fromkeys(map(torch.device, devices)))
        self._devices = [device for device in found if device.type == "cuda"]
        self._cpu = cpu
        self._saved: list[tuple[torch.Generator, torch.Tensor]] | None = None
        for device in found:
            if device.type not in {"cpu", "cuda"}:
                raise ValueError(f"`devices` must be CPUs or CUDA devices, got {device}.")

    def seed(self, seed: int) -> None:
        """Begin a shard: put the generators to the start of its stream.

        Args:
            seed: The stream, as `stream_seed` gives it; in 0..2³²-1.

        Raises:
            OrderError: Outside of the ``with``.
            ValueError: The seed is out of range.
        """
        if not 0 <= seed < SEEDS:
            check_seed(seed)
        if self._saved is None:
            raise OrderError("`DefaultStream.seed` must be called inside its `with` block.")
        for generator, _ in self._saved:
            generator.manual_seed(seed)

    def __enter__(self) -> DefaultStream:
        if self._saved is not None:
            raise OrderError("A `DefaultStream` must be left before it is entered again.")
        generators = [torch.default_generator] if self._cpu else []
        for device in self._devices:
            with torch.cuda.device(device):  # "cuda" without a number is the current one
                generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._saved = list(zip(generators, map(torch.Generator.get_state, generators), strict=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        saved, self._saved = self._saved or [], None
        for generator, state in saved:
            generator.set_state(state)
