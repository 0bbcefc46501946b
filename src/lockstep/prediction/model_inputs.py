"""Choose which entries of a batch a model receives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.nest import call_arguments


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Chooses the entries of a batch that a model receives; a target is left out.

    Attributes:
        target: True if the last entry of a tuple is the target, or the key of the target in a dict; False if there is
            none; None to decide by the parameters of the forward.
        required: The number of positional parameters without a default.
        positional: The number of positional parameters; None without a limit.
        names: The names of the parameters; None if the forward takes any keyword.
    """

    target: bool | str | None
    required: int
    positional: int | None
    names: frozenset[str] | None

    @classmethod
    def of_forward(cls, forward: Callable[..., Any], target: bool | str | None) -> ModelInputs:
        """Return the inputs of a forward.

        Args:
            forward: The bound forward of the model.
            target: The target of a batch, see the class.
        """
        parameters = inspect.signature(forward).parameters.values()
        kinds = {each.kind for each in parameters}
        by_position = [each for each in parameters if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}]
        return cls(
            target,
            sum(each.default is each.empty for each in by_position),
            None if inspect.Parameter.VAR_POSITIONAL in kinds else len(by_position),
            None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(each.name for each in parameters),
        )

    def of_batch(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments of the model for a batch.

        Args:
            batch: The tensors of a batch or of a shard.

        Raises:
            KeyError: If a dict lacks the key of the target.
            ValueError: If the target is not known, and it is unclear whether the last entry of a tuple is one.
        """
        args, kwargs = call_arguments(batch)
        return self._without_target(args), (self._without_key(kwargs) if isinstance(batch, Mapping) else kwargs)

    def _without_target(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # A single entry is always an input.
        if self.target is False or len(args) <= 1:
            return args
        if self.target is not None:
            return args[:-1]
        if len(args) <= self.required:
            return args
        if self.positional is not None and len(args) == self.positional + 1:
            return args[:-1]
        raise ValueError(
            "`target` must be given if the model may take the last entry of a batch or not, got None for "
            f"{len(args)} entries and a forward with {self.required} required parameters. Pass target=True to leave "
            "out the last entry, or target=False to pass all of them."
        )

    def _without_key(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self.target, str):
            if self.target not in kwargs:
                raise KeyError(f"`target` must be one of {sorted(kwargs)}, the keys of a batch, got {self.target!r}.")
            return {name: value for name, value in kwargs.items() if name != self.target}
        if self.target is None and self.names is not None:
            return {name: value for name, value in kwargs.items() if name in self.names}
        return kwargs
