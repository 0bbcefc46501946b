"""Averages of the weights, and of the ratio of two observed values."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.arguments import check_bool, check_instance, check_number, look_up
from lockstep.errors import StateError
from lockstep.metrics import Average, Mean
from lockstep.precision import HALF_PRECISION
from lockstep.state import check_keys
from lockstep.trainer import EDITOR, WRITER, Extension, Trainer
from lockstep.triggers import TriggerSpec
from lockstep.updaters import MAIN


class ExponentialMovingAverage(Extension):
    """Averages the weights of a model over updates with weights that decrease exponentially.

    With weights w after an update, average a and decay d::

        a ← d·a + (1 - d)·w

    The first update sets a to w. Weights in half precision are averaged in float32 and then rounded, because the
    changes of a single update would be rounded away. The average is a `torch.optim.swa_utils.AveragedModel`, a copy of
    the model of which `module` is evaluated, saved and used like the model itself. It is part of the saved state of the
    trainer, and so of every snapshot. An `Evaluator` with the same trigger evaluates the average after it has been
    updated.

    Args:
        model: The model that is averaged, which has all its parameters: one of the updater's, or one of the same class
            with the same shapes.
        decay: The decay d, at least 0 and less than 1.
        model_name: The name of the model in the updater; by default that of `model`, or ``"main"`` if it is none of the
            updater's.
        use_buffers: Whether floating-point buffers are averaged, too; by default all buffers are copied.
        trigger: The trigger that decides when to update the average.

    Raises:
        ValueError: If the decay is out of range.

    Determinism: elementwise on one thread, from weights that are equal on all placements; so are its bits.

    References: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; Tarvainen and
    Valpola, "Mean teachers are better role models", 2017, arXiv:1703.01780, section 2.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> average = ExponentialMovingAverage(model, decay=0.99)
        >>> average.module(torch.zeros(1, 2)).shape
        torch.Size([1, 1])
    """

    # Before evaluations, which are to use the average of this update.
    priority = WRITER + 1

    def __init__(
        self,
        model: torch.nn.Module,
        decay: float = 0.999,
        *,
        model_name: str | None = None,
        use_buffers: bool = False,
        trigger: TriggerSpec = (1, "iteration"),
    ) -> None:
        check_instance("model", model, torch.nn.Module, "a torch.nn.Module")
        check_bool("use_buffers", use_buffers)
        self.model_name = model_name
        self._model, self._name = model, model_name or MAIN
        self.trigger = trigger
        self.average = AveragedModel(model, use_buffers=use_buffers)
        self.decay = decay
        # Not trained, so no pass needs to record how it was computed.
        self.average.requires_grad_(requires_grad=False)
        self._exact = {
            name: tensor.detach().float()
            for name, tensor in self._averaged_tensors(self.module).items()
            if tensor.dtype in HALF_PRECISION
        }
        """The float32 averages of the tensors in half precision, by name."""

    @property
    def decay(self) -> float:
        """The decay d of the next update of the average, which can be set at any time; it is no part of the state."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        check_number("decay", decay, least=0, below=1)
        self._decay = decay
        self.average.multi_avg_fn = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # of torch

    @property
    def module(self) -> torch.nn.Module:
        """The copy of the model with the averaged weights."""
        module: torch.nn.Module = self.average.module
        return module

    def __call__(self, trainer: Trainer) -> None:
        """Update the average with the current weights.

        Raises:
            KeyError: If the updater has no model of this name.
        """
        model = look_up(self._name, trainer.updater.get_all_models(), "model_name")
        is_first = bool(self._exact) and int(self.average.n_averaged) == 0
        self.average.update_parameters(model)
        given, rounded = self._averaged_tensors(model), self._averaged_tensors(self.module)
        for name, exact in self._exact.items():
            weight = given[name].detach().to(exact.device, torch.float32)
            rounded[name].copy_(exact.copy_(weight) if is_first else exact.lerp_(weight, 1 - self.decay))

    def initialize(self, trainer: Trainer) -> None:
        """Check that the updater's model has the weights that are averaged.

        Raises:
            KeyError: If the updater has no model of this name.
            ValueError: If its weights have other names or shapes than those of the average.
        """
        models = trainer.updater.get_all_models()
        self._name = self.model_name or next((name for name, each in models.items() if each is self._model), MAIN)
        model = look_up(self._name, models, "model_name")
        weights, averages = ({name: each.shape for name, each in of.named_parameters()} for of in (model, self.module))
        if weights != averages:
            name = min({*weights.items()} ^ {*averages.items()})[0]
            raise ValueError(
                f"`model` of ExponentialMovingAverage must be the updater's model {self._name!r}, got one that "
                f"differs in {name!r}. Pass the model that is trained, or name another one by `model_name`."
            )

    def _averaged_tensors(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors of a model that are averaged, by name."""
        return dict(chain(model.named_parameters(), model.named_buffers() if self.average.use_buffers else ()))

    def state_dict(self) -> dict[str, object]:
        """Return a copy of the average, in float32 as well if it is in half precision, and its number of updates."""
        state: dict[str, object] = {"average": _cloned(self.average.state_dict())}
        return {**state, "exact": _cloned(self._exact)} if self._exact else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        Raises:
            StateError: If a key is missing or unknown, or a tensor has another shape; nothing has changed then.
        """
        parts: dict[str, Mapping[str, torch.Tensor]] = {"average": self.average.state_dict()}
        if self._exact:
            parts["exact"] = self._exact
        check_keys(state, parts, of="ExponentialMovingAverage")
        for key, own in parts.items():
            check_keys(state[key], own, of=f"the {key} of ExponentialMovingAverage")
            # PyTorch would load the tensors that fit before it raises an error.
            for name, tensor in state[key].items():
                shape, found = tuple(own[name].shape), tuple(tensor.shape)
                if found != shape:
                    raise StateError(
                        f"`state[{key!r}][{name!r}]` must have shape {shape}, got {found}. Average the model that "
                        "was averaged when the state was saved."
                    )
        self.average.load_state_dict(dict(state["average"]))
        for name, exact in self._exact.items():
            exact.copy_(state["exact"][name])


def _cloned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


class MicroAverage(Extension):
    """Observes the sum of one value divided by the sum of another, over the updates since it last did.

    For numerators n and denominators d of several updates::

        result = Σ n / Σ d

    A loss function reports both as means over its samples, here for the accuracy over all tokens of sequences ``x``::

        lockstep.report({"correct": correct / len(x), "tokens": tokens / len(x)})

    The quotient is that of all tokens, however they are distributed over shards and updates. It is observed with the
    sum of the denominators as its weight. Numbers that are not divided by those of the samples are warned of, because
    their means over shards depend on the number of shards.

    Args:
        numerator: The name of the observed value that is summed above, such as ``"main/correct"``.
        denominator: The name of the observed value that is summed below.
        result: The name of the quotient.
        trigger: The trigger that ends an interval.

    Determinism: depends only on the values and their order, see `metrics.Average`; saving and loading changes no bit.
    """

    priority = EDITOR
    _saved = ("numerator", "denominator")

    def __init__(self, numerator: str, denominator: str, result: str, *, trigger: TriggerSpec = (1, "epoch")) -> None:
        self.numerator_key = numerator
        self.denominator_key = denominator
        self.result_key = result
        self.trigger = trigger
        self._numerator = Average()
        self._denominator = Average()

    @property
    def name(self) -> str:
        """The default name, which contains that of the result."""
        return f"MicroAverage({self.result_key})"

    def collect(self, trainer: Trainer) -> None:
        """Add the values of one update, if it has observed both; nothing is read from the device."""
        observation = trainer.observation
        if self.numerator_key in observation and self.denominator_key in observation:
            self._numerator.update(observation[self.numerator_key])
            self._denominator.update(observation[self.denominator_key])

    def __call__(self, trainer: Trainer) -> None:
        """Observe the quotient, and begin the next interval; without values nothing is observed."""
        if not self._denominator.empty:
            trainer.observe(self.result_key, Mean(self._numerator.total(), self._denominator.total()))
        self._numerator.reset()
        self._denominator.reset()
