"""NNabla's solvers by what does their work here: rules of lockstep's and of torch's, a group a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.compat.nnabla import LAMB, SGDW
from lockstep.optim import MomentumSGD, hooks

TINY = 1e-30
"""Lars has its epsilon as a bound of norms; where ours has one, it is to change nothing."""


class Solver:
    """An optimizer, and what NNabla's calls ask of it.

    Attributes:
        optimizer: With one parameter a group.
        default_decay: The rate of decay of a solver that decays by itself, unless it is told another for its
            next update; None for one whose gradients are changed by `weight_decay`.
    """

    names: ClassVar[dict[str, str]] = {}
    """What NNabla calls the state that is remembered for a parameter, by our word."""

    def __init__(self, optimizer: Optimizer, default_decay: float | None = None) -> None:
        self.optimizer = optimizer
        self.default_decay = default_decay

    def update(self) -> None:
        self.optimizer.step()
        if self.default_decay is not None:
            self.set_own_decay(self.default_decay)

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def weight_decay(self, rate: float) -> None:
        if self.default_decay is None:
            hooks.WeightDecay(rate)(self.optimizer)
        else:
            self.set_own_decay(rate)

    def set_own_decay(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = rate

    def clip_grad_by_norm(self, limit: float) -> None:
        """Clip each parameter by its own norm; 0 is for no clipping there, and here one leaves it away."""
        for group in self.optimizer.param_groups if limit else ():
            for weight in group["params"]:
                hooks.GradientClipping(limit)(self.optimizer, weight)

    def state(self, weight: Tensor) -> dict[str, Tensor]:
        kept = self.optimizer.state.get(weight, {})
        return {theirs: kept[ours].clone() for ours, theirs in self.names.items() if ours in kept}

    def count(self, weight: Tensor) -> int | None:
        """How many updates moved a parameter, where the optimizer remembers it."""
        del weight
        return None


class Momentum(Solver):
    """NNabla's Momentum; its Sgd has no momentum."""

    names: ClassVar[dict[str, str]] = {"velocity": "m"}

    def __init__(self, weights: Iterable[Tensor], lr: float, momentum: float) -> None:
        super().__init__(MomentumSGD(apart(weights), lr=lr, momentum=momentum))


class Sgd(Momentum):
    """NNabla's Sgd."""

    names: ClassVar[dict[str, str]] = {}

    def __init__(self, weights: Iterable[Tensor], lr: float) -> None:
        super().__init__(weights, lr, 0.0)


class Nesterov(Solver):
    """NNabla's Nesterov, whose velocity is torch's times minus the rate."""

    def __init__(self, weights: Iterable[Tensor], lr: float, momentum: float) -> None:
        super().__init__(torch.optim.SGD(apart(weights), lr=lr, momentum=momentum, nesterov=True))

    def set_learning_rate(self, lr: float) -> None:
        """Keep the old rate in the velocities, as the original does; torch's follow the new one at once."""
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                if weight in self.optimizer.state:
                    self.optimizer.state[weight]["momentum_buffer"] *= group["lr"] / lr
        super().set_learning_rate(lr)

    def state(self, weight: Tensor) -> dict[str, Tensor]:
        kept = self.optimizer.state.get(weight, {})
        return {"m": kept["momentum_buffer"] * -self.optimizer.param_groups[0]["lr"]} if kept else {}


class Lars(Momentum):
    """NNabla's Lars, in two parts: a hook in front of a momentum rule."""

    names: ClassVar[dict[str, str]] = {"velocity": "v"}

    def __init__(
        self,
        weights: Iterable[Tensor],
        lr: float,
        momentum: float,
        coefficient: float = 1e-3,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(weights, lr, momentum)
        self.options = {"threshold": eps, "eps": TINY, "coefficient": coefficient}
        self.optimizer.add_hook(hooks.GradientLARS(**self.options))
        self.default_decay = 0.0

    def set_own_decay(self, rate: float) -> None:
        self.optimizer.remove_hook("GradientLARS")
        self.optimizer.add_hook(hooks.GradientLARS(**self.options, weight_decay=rate))


class SgdW(Solver):
    """NNabla's SgdW."""

    names: ClassVar[dict[str, str]] = {"velocity": "m"}

    def __init__(self, weights: Iterable[Tensor], lr: float, momentum: float, decay: float = 1e-4) -> None:
        super().__init__(SGDW(apart(weights), lr, momentum, decay), decay)


class Adam(Solver):
    """NNabla's Adam, whose epsilon comes before the correction of the second moment."""

    names: ClassVar[dict[str, str]] = {"exp_avg": "mean", "exp_avg_sq": "var"}
    rule: ClassVar[type[Optimizer]] = torch.optim.Adam

    numbers: ClassVar[list[float]] = [0.001, 0.9, 0.999, 1e-8]
    """The rate, the decays of both moments and epsilon, unless they are given."""

    def __init__(self, weights: Iterable[Tensor], *given: float) -> None:
        lr, beta1, beta2, self.eps = [*given, *self.numbers[len(given) :]]
        super().__init__(self.rule(apart(weights), lr=lr, betas=(beta1, beta2)))  # type: ignore[call-arg]
        self.optimizer.register_step_pre_hook(self.set_epsilon)

    def set_epsilon(self, *_: Any) -> None:
        for group in self.optimizer.param_groups:
            (weight,) = group["params"]
            group["eps"] = self.eps / (1 - group["betas"][1] ** (self.count(weight) + 1)) ** 0.5

    def count(self, weight: Tensor) -> int:
        kept = self.optimizer.state.get(weight, {})
        return int(kept["step"]) if kept else 0


class AdamW(Adam):
    """NNabla's AdamW, whose decay is a share of the weight where torch's is times the rate."""

    rule: ClassVar[type[Optimizer]] = torch.optim.AdamW

    def __init__(self, weights: Iterable[Tensor], *given: float) -> None:
        *numbers, decay = given if len(given) > len(self.numbers) else (*given, 1e-4)
        super().__init__(weights, *numbers)
        self.first_lr, self.default_decay = self.optimizer.param_groups[0]["lr"], decay
        self.set_own_decay(decay)

    def set_own_decay(self, rate: float) -> None:
        super().set_own_decay(rate / self.first_lr)


class Lamb(Solver):
    """NNabla's Lamb, whose bounds of the norm come before epsilon, which bounds the length of a step, too."""

    names: ClassVar[dict[str, str]] = {"mean": "mean", "mean_square": "var"}

    numbers: ClassVar[list[float]] = [0.001, 0.9, 0.999, 0.0, 10.0, 1e-6, False]
    """The rate, the decays of both moments, the bounds, epsilon and the correction, unless they are given."""

    def __init__(self, weights: Iterable[Tensor], *given: float) -> None:
        lr, beta1, beta2, least, greatest, eps, correction = [*given, *self.numbers[len(given) :]]
        rule = LAMB(
            apart(weights),
            lr,
            (beta1, beta2),
            eps,
            norm_bounds=(least, greatest),
            threshold=eps,
            bias_correction=bool(correction),
        )
        super().__init__(rule, 0.0)

    def count(self, weight: Tensor) -> int:
        count: int = self.optimizer.state.get(weight, {}).get("count", 0)
        return count


RULES: dict[str, Callable[..., Solver]] = {
    each.__name__: each for each in (Sgd, Momentum, Nesterov, Lars, SgdW, Adam, AdamW, Lamb)
}


def solver_of(case: Any, weights: Iterable[Tensor]) -> Solver:
    """Make the solver of a case of the updater, which has its numbers by name."""
    solver = case["solver"]
    given = [solver["lr"], *([] if solver["momentum"] is None else [solver["momentum"]])]
    return RULES[solver["name"]](weights, *given)


def apart(weights: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Give each parameter a group, for the originals treat each by itself."""
    return [{"params": [weight]} for weight in weights]
