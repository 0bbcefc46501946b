"""The interface of a part of a dataset: a file, or a stream that can be opened again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Part(ABC):
    """A part of a dataset, such as a file, which is read in blocks of samples.

    A block is what one request reads: some lines, a row group, a piece of an archive. It must hold the same samples
    whenever and wherever it is read.

    Attributes:
        in_order: Whether the blocks must be read one after the other, because a later one is expensive to find. Then
            only whole parts are shuffled, and not their blocks.
    """

    in_order = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the part in errors and warnings, such as its path."""

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """The number of samples of each block."""

    @abstractmethod
    def read(self, block: int) -> Sequence[Any]:
        """Read a block.

        A sample that can be bad without the others, such as one that is parsed, should be made when the result is
        indexed, so that its error is that of one record.

        Args:
            block: The index of the block.

        Returns:
            The samples of the block, as many as `lengths` says.
        """
