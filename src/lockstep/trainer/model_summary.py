"""Describe the parts of a model and their parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.arguments import check_instance


@dataclass(frozen=True)
class SummaryRow:
    """One module of a model.

    Attributes:
        name: The name of the module; empty for the model itself.
        kind: The name of its class.
        parameters: The number of elements in its own parameters, without those of its children.
        trained: The number of those that require gradients.
        size: The size of its own parameters and buffers in bytes.
    """

    name: str
    kind: str
    parameters: int
    trained: int
    size: int


@dataclass(frozen=True)
class ModelSummary:
    """The modules of a model, and a table of them as text.

    Attributes:
        rows: The modules in the order of `torch.nn.Module.named_modules`.
    """

    rows: tuple[SummaryRow, ...]

    @property
    def parameters(self) -> int:
        """The number of elements in all parameters; those of a tied parameter count once."""
        return sum(row.parameters for row in self.rows)

    @property
    def trained(self) -> int:
        """The number of elements in all parameters that require gradients."""
        return sum(row.trained for row in self.rows)

    @property
    def size(self) -> int:
        """The size of all parameters and buffers in bytes."""
        return sum(row.size for row in self.rows)

    def __str__(self) -> str:
        cells = [("module", "class", "parameters", "trained")]
        cells += [(row.name or "(model)", row.kind, f"{row.parameters:,}", f"{row.trained:,}") for row in self.rows]
        cells.append(("total", f"{self.size / 2**20:,.1f} MiB", f"{self.parameters:,}", f"{self.trained:,}"))
        name, kind, count, trained = (max(map(len, column)) for column in zip(*cells, strict=True))
        return "\n".join(f"{a:<{name}}  {b:<{kind}}  {c:>{count}}  {d:>{trained}}" for a, b, c, d in cells)


def summarize_model(model: nn.Module) -> ModelSummary:
    """Return a description of the modules of a model with the numbers of their parameters; nothing is computed.

    Args:
        model: The model. Parameters that get their shapes in the first update count as 0.

    >>> print(summarize_model(nn.Sequential(nn.Linear(3, 4), nn.ReLU())))
    module   class       parameters  trained
    (model)  Sequential           0        0
    0        Linear              16       16
    1        ReLU                 0        0
    total    0.0 MiB             16       16
    """
    check_instance("model", model, nn.Module, "a torch.nn.Module")
    rows, seen = list[SummaryRow](), set[torch.Tensor]()
    for name, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        # A tied tensor counts where it is first.
        own = [tensor for tensor in dict.fromkeys(tensors) if tensor not in seen and not is_lazy(tensor)]
        seen.update(own)
        parameters = [tensor for tensor in own if isinstance(tensor, nn.Parameter)]
        row = SummaryRow(
            name=name,
            kind=type(module).__name__,
            parameters=sum(tensor.numel() for tensor in parameters),
            trained=sum(tensor.numel() for tensor in parameters if tensor.requires_grad),
            size=sum(tensor.numel() * tensor.element_size() for tensor in own),
        )
        rows.append(row)
    return ModelSummary(tuple(rows))
