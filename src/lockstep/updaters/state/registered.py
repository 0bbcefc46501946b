"""Save which tensors the modules of a model hold, to undo a load that fails halfway."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy


class RegisteredTensors:
    """The tensors of all modules by name, the tensors among them without a shape, and the extra state of modules.

    Hooks of a load and overrides of `_load_from_state_dict` may replace these tensors, and lazy modules give them a
    shape. The values of tensors are saved by a `Savepoint`.

    Args:
        model: The model, or all networks as one module.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        tables: list[Any] = [table for module in modules for table in (module._parameters, module._buffers)]
        self._tables = [(table, dict(table)) for table in tables]
        tensors = {id(tensor): tensor for table in tables for tensor in table.values()}
        # Loading gives these tensors a shape by changing their class, so both the class and the data are saved.
        self._shapeless = [(tensor, type(tensor), tensor.data) for tensor in tensors.values() if is_lazy(tensor)]
        self._extra = [
            (module, copy.deepcopy(module.get_extra_state()))
            for module in modules
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]

    def restore(self) -> None:
        """Restore the registered tensors and the extra state; tensors keep their current values."""
        for table, before in self._tables:
            # The tables are changed in place, because modules refer to these very dicts.
            table.clear()
            table.update(before)
        for tensor, kind, data in self._shapeless:
            if type(tensor) is not kind:
                tensor.data = data
                tensor.__class__ = kind
        for module, state in self._extra:
            module.set_extra_state(state)
