"""Compare two runs by their logs of digests and the manifests of their snapshots, without reading a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import printable
from lockstep.snapshots.digest_log import read_digest_log, record_of
from lockstep.snapshots.restoring import compare_fields
from lockstep.snapshots.snapshot import list_snapshots


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs.

    Attributes:
        common: The updates that both runs have logged, ascending.
        equal: The last update up to which all digests are equal; None if there is none.
        first: The first update that differs; None if all are equal.
        differing: The tensors that differ after this update. Empty if only counters or options do.
        recipe: The fields of the recipe that differ, if both runs have snapshots.
        kernel_class: The properties of the kernels that differ, if both runs have snapshots.
    """

    common: tuple[int, ...]
    equal: int | None
    first: int | None
    differing: tuple[str, ...]
    recipe: tuple[str, ...]
    kernel_class: tuple[str, ...]

    def result(self, limit: int = 10) -> str:
        """Return a line about the digests of two runs that have any in common, and one about the tensors.

        Args:
            limit: The number of tensors that are named.
        """
        count = f"{len(self.common)} updates that both runs have logged"
        if self.first is None:
            return f"Equal: all {count}, {self.common[0]} to {self.common[-1]}."
        since = "" if self.equal is None else f" Update {self.equal} is equal."
        differing = self.listed(self.differing, limit) or "none; counters, options or positions differ"
        return f"Different: update {self.first} is the first to differ, of {count}.{since}\nTensors: {differing}."

    @staticmethod
    def listed(names: Sequence[str], limit: int = 10) -> str:
        """Return names for a sentence, and how many more there are.

        Args:
            names: The names.
            limit: The number of names that are named.

        >>> Comparison.listed(["a", "b", "c"], 2), Comparison.listed([])
        ('a, b and 1 more', '')
        """
        return printable(", ".join(names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def compare_runs(first: str | Path, second: str | Path) -> Comparison:
    """Compare the digests of two runs, update by update.

    Args:
        first: The folder of one run.
        second: The folder of the other one.
    """
    outs = (Path(first), Path(second))
    manifests = [[each.manifest for each in list_snapshots(out) if each.manifest is not None] for out in outs]
    # A manifest has whole digests of the same state, so that either will do; the log has more updates.
    records = [
        {**{each.update: record_of(each) for each in found}, **read_digest_log(out)}
        for out, found in zip(outs, manifests, strict=True)
    ]
    common = tuple(sorted(records[0].keys() & records[1].keys()))
    unequal = (update for update in common if records[0][update].digest != records[1][update].digest)
    differs = next(unequal, None)
    before = [update for update in common if differs is None or update < differs]
    differing = [] if differs is None else records[0][differs].differing(records[1][differs])
    # The fields in which the newest snapshots differ.
    fields = {}
    for name in ("recipe", "kernel_class"):
        pair = [getattr(found[-1], name) for found in manifests] if all(manifests) else [{}, {}]
        fields[name] = tuple(each.name for each in compare_fields(*pair))
    return Comparison(
        common=common,
        equal=before[-1] if before else None,
        first=differs,
        differing=tuple(differing),
        **fields,
    )
