"""MXNet's descriptions of inputs, and its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True)
class DataDesc:
    """The name, the shape, the dtype and the layout of an input.

    Two descriptions are equal if their names and shapes are.

    Args:
        name: The name of the input.
        shape: The shape of the input, with the samples of the whole batch.
        dtype: The dtype of the values; informational.
        layout: A letter for each dimension, with N for the samples. Only the position of the N is used.

    >>> DataDesc("x", (5, 7, 3), layout="TNC").batch_axis
    1
    """

    name: str
    shape: Sequence[int]
    dtype: torch.dtype = field(default=torch.float32, compare=False)
    layout: str | None = field(default="NCHW", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))

    @property
    def batch_axis(self) -> int | None:
        """The dimension of the samples, or None if every device gets the whole array."""
        return self.axis_of(self.layout)

    @staticmethod
    def axis_of(layout: str | None) -> int | None:
        """Return the dimension of the samples in a layout, or None if there is none."""
        axis = DataDesc.get_batch_axis(layout)
        return None if axis < 0 else axis

    @staticmethod
    def get_batch_axis(layout: str | None) -> int:
        """Return the position of the N in a layout: 0 without a layout, -1 if there is no N.

        >>> [DataDesc.get_batch_axis(layout) for layout in ("NCHW", "TNC", None, "TC")]
        [0, 1, 0, -1]
        """
        return 0 if layout is None else layout.find("N")


Description: TypeAlias = "DataDesc | tuple[str, Sequence[int]]"


def parse(descriptions: Sequence[Description] | None) -> list[DataDesc]:
    """Convert descriptions to `DataDesc`; a pair of a name and a shape has MXNet's default layout."""
    return [each if isinstance(each, DataDesc) else DataDesc(*each) for each in descriptions or ()]


def names_and_shapes(descriptions: Sequence[DataDesc]) -> list[tuple[str, Sequence[int]]]:
    """Return the names and shapes in the form that `lockstep.ReplicaGroup` accepts."""
    return [(each.name, each.shape) for each in descriptions]


def batch_size(descriptions: Sequence[DataDesc]) -> int | None:
    """Return the number of samples according to the first input that has a dimension for them, or None."""
    for each in descriptions:
        if each.batch_axis is not None:
            return each.shape[each.batch_axis]
    return None


@dataclass(eq=False)
class DataBatch:
    """The arrays of one batch, in the order of the descriptions.

    Args:
        data: The inputs of the batch.
        label: The labels, if there are any.
        pad: The number of samples at the end that are padding.
        index: The indices of the samples, for your own use.
        bucket_key: Any value, for your own use.
        provide_data: The descriptions of the data, for your own use.
        provide_label: The descriptions of the labels, for your own use.
    """

    data: Sequence[torch.Tensor]
    label: Sequence[torch.Tensor] | None = None
    pad: int | None = None
    index: Sequence[int] | None = None
    bucket_key: Any = None
    provide_data: Sequence[Description] | None = None
    provide_label: Sequence[Description] | None = None


def merge_batches(batches: Sequence[DataBatch], descriptions: Sequence[DataDesc]) -> DataBatch:
    """Merge batches that were split before, one per device.

    Args:
        batches: The batches, at least one; either all of them have labels or none.
        descriptions: The descriptions of the data and then of the labels. An array without a dimension for
            samples is taken from the first device.
    """
    rows = [[*batch.data, *(batch.label or ())] for batch in batches]
    # Not strict, because without labels there are fewer arrays than descriptions.
    arrays = [
        parts[0] if each.batch_axis is None else torch.cat(parts, each.batch_axis)
        for each, *parts in zip(descriptions, *rows, strict=False)
    ]
    num_data = len(batches[0].data)
    label = arrays[num_data:] if batches[0].label is not None else None
    return DataBatch(arrays[:num_data], label, batches[-1].pad)
