"""Remember what the modules of a model hold, for a load that fails after some of them have taken theirs."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy


class RegisteredTensors:
    """Which tensors the modules hold under which names, which of them have no shape, and the extra state.

    Hooks of a load and overrides of `_load_from_state_dict` may put other tensors in their place, and
    lazy modules give theirs a shape. The values of tensors are a `Savepoint`'s work.

    Args:
        model: All networks.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        tables: list[Any] = [table for module in modules for table in (module._parameters, module._buffers)]
        self._tables = [(table, dict(table)) for table in tables]
        tensors = {id(tensor): tensor for table in tables for tensor in table.values()}
        self._shapeless = [(tensor, type(tensor), tensor.data) for tensor in tensors.values() if is_lazy(tensor)]
        self._extra = [
            (module, copy.deepcopy(module.get_extra_state()))
            for module in modules
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]

    def restore(self) -> None:
        """Put everything back; tensors that were there have their values of now."""
        for table, before in self._tables:
            table.clear()
            table.update(before)
        for tensor, kind, data in self._shapeless:
            if type(tensor) is not kind:
                tensor.data = data
                tensor.__class__ = kind
        for module, state in self._extra:
            module.set_extra_state(state)
