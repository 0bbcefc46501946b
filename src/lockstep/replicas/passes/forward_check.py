"""Check a training forward of a model by a new copy of it, which computes one of the shards once more.

If nothing but the model, its inputs and the random streams decides, the copy returns the same bits, and the values for
some samples are those for parts of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from lockstep import nest
from lockstep.digest import checksums
from lockstep.errors import DeterminismWarning, is_memory_error, warn
from lockstep.plan import Shard
from lockstep.replicas.batch.inputs import Inputs
from lockstep.replicas.batch.outputs import Outputs, ShardForward
from lockstep.replicas.passes.means import (
    Computed,
    NoMeans,
    find_no_means,
    gradient_share,
    samples_of,
    without_batch_statistics,
)
from lockstep.replicas.passes.shard_runner import Around, ShardRunner
from lockstep.replicas.pool.probes import Draws, has_compiled, uncompiled
from lockstep.streams import restored_generators

CAUSES: Final = (
    "Something decides that is no part of the model, its buffers and the random streams: a clock, a counter, a cache, "
    "a generator of your own, a hook or a dataset with state, memory that was not initialised, the thread or device, "
    "or a kernel that is not deterministic (see lockstep.use_deterministic_kernels). The result of the run then "
    "depends on where shards are computed. `lockstep verify` names the operator, its line and the kind of the cause."
)

DEPENDS: Final = "an output whose values for a sample depend on the other samples of its shard,"


@dataclass(frozen=True, slots=True)
class ForwardCheck:
    """The check of one forward.

    Attributes:
        runner: The runner of a new copy of the model.
        run: Returns the results of shards, given these and what is entered around each; in the streams of the forward,
            in the thread of the runner's device.
        outputs: The outputs of the forward.
    """

    runner: ShardRunner
    run: Callable[[Sequence[Shard], Around | None], list[ShardForward]]
    outputs: Outputs

    def check(self, last: ShardForward, buffers: Sequence[torch.Tensor | None]) -> dict[int, str]:
        """Warn if the copy returns other bits; else return what outputs are that depend on how the batch is split.

        Args:
            last: The result of the shard that a replica has computed last.
            buffers: What that shard has left in each buffer; None where it changed nothing.

        Returns:
            What the outputs are that are no means over samples, or depend on other samples, by their indices.
        """
        with restored_generators():
            # What is compiled would be compiled anew.
            differs = not has_compiled() and self._differs(last, buffers)
            return {} if differs else self._compare_parts(last.shard)

    def _differs(self, last: ShardForward, buffers: Sequence[torch.Tensor | None]) -> bool:
        """Compute a shard once more; warn and return True if its bits differ, or if it cannot be computed."""
        start = f"Shard {last.shard.index} of a forward was computed once more by a new copy of the model, which"
        try:
            (again,) = self.run([last.shard], None)
        except Exception as error:  # noqa: BLE001 - the first computation has raised none
            # The second computation needs more memory than the first, whose results are still there.
            if not is_memory_error(error):
                warn(f"{start} raised {type(error).__name__}: {error}", DeterminismWarning)
            return True
        left = self.runner.buffers.left()
        names = [f"`{name}`" for name in self.outputs.names] + [f"buffer {at}" for at in range(len(left))]
        for name, one, other in zip(names, [*last.tensors, *buffers], [*again.tensors, *left], strict=True):
            if one is not None and not one.is_meta and (other is None or checksums([one]) != checksums([other])):
                warn(f"{start} returned other bits in {name}. {CAUSES}", DeterminismWarning)
                return True
        return False

    def _compare_parts(self, shard: Shard) -> dict[int, str]:
        """Return what outputs are that depend on how the batch is split, by their indices."""
        size, whole = len(shard.samples), self.outputs.num_samples
        if size == 1:
            return {}

        def compute(draws: Draws, number: int) -> list[Computed]:
            samples, parts = samples_of(shard.samples, number, whole)
            shards = [
                replace(shard, index=at, samples=samples[part.start : part.stop]) for at, part in enumerate(parts)
            ]

            @contextmanager
            def around(place: int, shard: Shard, replica: nn.Module) -> Iterator[None]:
                del place
                with without_batch_statistics(replica), uncompiled(), draws:
                    draws.start(parts[shard.index])
                    yield
                    draws.end()

            results = self.run(shards, around)
            return [self._computed(each, part, len(samples)) for each, part in zip(results, parts, strict=True)]

        differs, reported = find_no_means(compute, size, self.runner.device)
        found = {int(index): what for index, what in reported.items()}
        for index, dim in enumerate(self.outputs.dims):
            if dim is not None:
                found |= {index: DEPENDS} if index in found else {}
            elif why := differs or self._operation(index):
                found.setdefault(index, why)
        return found

    def _operation(self, index: int) -> str:
        """Return what an output is by the operations that computed it; empty for a mean, or where shards agree."""
        seen, values = NoMeans(), {each.shard: each.tensors[index] for each in self.outputs.results}
        for shard, value in values.items():
            seen.note(value, shard.batch)
        return " and ".join(sorted(seen.found)) if len(set(checksums(values.values()))) > 1 else ""

    def _computed(self, result: ShardForward, part: range, size: int) -> Computed:
        """Return the values of the outputs for some samples, and the gradient of those that are one value for all."""
        reported: dict[str, Any] = {}
        total = torch.zeros((), device=self.runner.device)
        for index, (tensor, dim) in enumerate(zip(result.tensors, self.outputs.dims, strict=True)):
            if not tensor.requires_grad or tensor.is_complex():
                continue
            if dim is None:
                total = total + tensor.sum()
                reported[f"{index}"] = float(tensor.detach().double().sum()), len(part)
                continue
            rows = tensor.detach().movedim(dim, 0).flatten(1) if tensor.dim() > 1 else tensor.detach()[:, None]
            # Sizes without signs, so that nothing cancels; with other weights for other rows, which may change places.
            weights = 1 + torch.arange(part.start, part.stop, device=rows.device).cos()
            sizes = rows.double().abs().sum(1) + rows.double().square().sum(1)
            reported[f"{index}"] = float((weights * sizes).mean()), len(part)
        gradient = torch.zeros(0)
        if total.requires_grad:
            gradient = gradient_share(total, len(part) / size, self.runner.parameters)
        return Computed(0.0, len(part), gradient, reported)


def warn_of_lists(inputs: Inputs) -> None:
    """Warn of lists and arrays without tensors that have one entry per sample, because every shard gets them whole."""
    named = {f"args[{index}]": each for index, each in enumerate(inputs.args)} | inputs.kwargs
    for name, value in named.items():
        is_list = isinstance(value, list | tuple) or hasattr(value, "__array__")
        if is_list and not nest.tensors(value) and len(value) == inputs.num_samples:
            warn(
                f"`{name}` has one entry for each of the {inputs.num_samples} samples, and every shard gets it whole, "
                "because only tensors are split. Pass a tensor, such as the index of each sample."
            )


def warn_of_dependence(found: Mapping[int, str], grads: Sequence[torch.Tensor | None], rule: str, cure: str) -> None:
    """Warn of outputs that depend on how the batch is split.

    Args:
        found: What they are, by their indices.
        grads: The gradient of each output, or None for one that takes no part in backward.
        rule: The beginning of the warning, which ends before what the model returns.
        cure: Its end, a sentence.
    """
    for what in sorted({what for index, what in found.items() if grads[index] is not None}):
        warn(f"{rule} returns {what} so that the gradient depends on how the batch is split. {cure}")
