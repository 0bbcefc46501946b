"""MXNet's descriptions of inputs, and its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True)
class DataDesc:
    """The name and shape of an input, its dtype and its layout.

    Two are equal if name and shape are.

    Args:
        name: Of the input.
        shape: With all samples.
        dtype: Of the values; for the reader.
        layout: A letter for each dimension; N counts samples. Only the place of the N matters.

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
        """The dimension that counts samples; None where every device gets the whole array."""
        return self.axis_of(self.layout)

    @staticmethod
    def axis_of(layout: str | None) -> int | None:
        """Give the dimension that counts samples by a layout; None if none does."""
        axis = DataDesc.get_batch_axis(layout)
        return None if axis < 0 else axis

    @staticmethod
    def get_batch_axis(layout: str | None) -> int:
        """Give the place of the N in a layout: 0 without a layout, -1 where there is no N.

        >>> [DataDesc.get_batch_axis(layout) for layout in ("NCHW", "TNC", None, "TC")]
        [0, 1, 0, -1]
        """
        return 0 if layout is None else layout.find("N")


Description: TypeAlias = "DataDesc | tuple[str, Sequence[int]]"


def described(descriptions: Sequence[Description] | None) -> list[DataDesc]:
    """Read descriptions, of which a plain name and shape has MXNet's default layout."""
    return [each if isinstance(each, DataDesc) else DataDesc(*each) for each in descriptions or ()]


def pairs(descriptions: Sequence[DataDesc]) -> list[tuple[str, Sequence[int]]]:
    """Give names and shapes, as `lockstep.ReplicaGroup` takes them."""
    return [(each.name, each.shape) for each in descriptions]


def batch_size(descriptions: Sequence[DataDesc]) -> int | None:
    """Count the samples by the first input that has a dimension for them; None if none has."""
    for each in descriptions:
        if each.batch_axis is not None:
            return each.shape[each.batch_axis]
    return None


@dataclass(eq=False)
class DataBatch:
    """The arrays of one batch, in the order of the descriptions.

    Args:
        data: The inputs.
        label: The labels, if there are any.
        pad: How many samples at the end only fill the batch up.
        index: The numbers of the samples, for the caller's own use.
        bucket_key: For the caller's own use.
        provide_data: Descriptions of the data, for the caller's own use.
        provide_label: Descriptions of the labels, likewise.
    """

    data: Sequence[torch.Tensor]
    label: Sequence[torch.Tensor] | None = None
    pad: int | None = None
    index: Sequence[int] | None = None
    bucket_key: Any = None
    provide_data: Sequence[Description] | None = None
    provide_label: Sequence[Description] | None = None


def joined(batches: Sequence[DataBatch], descriptions: Sequence[DataDesc]) -> DataBatch:
    """Put batches together that were cut already, one a device.

    Args:
        batches: At least one, all with or all without labels.
        descriptions: Of data, then of labels. What has no dimension for samples is the first device's.
    """
    rows = [[*batch.data, *(batch.label or ())] for batch in batches]
    arrays = [
        parts[0] if each.batch_axis is None else torch.cat(parts, each.batch_axis)
        for each, *parts in zip(descriptions, *rows, strict=False)
    ]
    num_data = len(batches[0].data)
    label = arrays[num_data:] if batches[0].label is not None else None
    return DataBatch(arrays[:num_data], label, batches[-1].pad)
