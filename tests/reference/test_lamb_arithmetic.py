"""LAMB by the arithmetic of the originals, in float32 and at settings that no trace has.

Both are written here anew, a line for each of theirs: NNabla 1.35.1's Lamb and MXNet 1.9.1's lamb. Where
lockstep differs from them on purpose has a test of its own.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from mxnet_rules import optimizer_of, set_rate
from nnabla_rules import Lamb

Array = np.ndarray[Any, np.dtype[np.float32]]
NUM_STEPS = 8
TOLERANCE = 1e-5
"""As for the traces, of |value| + 1e-3, and of a tenth of the largest, for steps that end near 0."""


@dataclass
class Kept:
    """What both originals remember of a parameter."""

    mean: Array
    var: Array
    count: int = 0

    def take(self, grad: Array, beta1: np.float32, beta2: np.float32) -> None:
        self.count += 1
        self.mean = beta1 * self.mean + (np.float32(1) - beta1) * grad
        self.var = beta2 * self.var + (np.float32(1) - beta2) * grad * grad

    def corrected(self, beta1: np.float32, beta2: np.float32, *, correct: bool) -> tuple[Array, Array]:
        if not correct:
            return self.mean, self.var
        first, second = (np.float32(1 - float(beta) ** self.count) for beta in (beta1, beta2))
        return self.mean / first, self.var / second


@dataclass
class Setting:
    """Numbers drawn for a run; some at the edges."""

    seed: int
    lr: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    bounds: tuple[float, float] = (0.0, 0.0)
    correct: bool = False
    size: float = 0.0
    grad_size: float = 0.0
    decays: list[float | None] = field(default_factory=list)
    clip: float | None = None

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)  # noqa: S311 - draws settings, no secrets
        self.lr = draw.choice([1e-3, 1e-2, 0.1])
        self.betas = draw.choice([0.0, 0.5, 0.9]), draw.choice([0.5, 0.9, 0.999])
        self.eps = draw.choice([1e-8, 1e-6, 1e-2])
        self.bounds = draw.choice([0.0, 1e-6, 0.1]), draw.choice([1.5, 10.0, 100.0])
        self.correct = draw.random() < 0.5
        self.size = draw.choice([1e-4, 0.1, 1.0, 30.0])
        self.grad_size = draw.choice([1e-3, 1.0, 100.0])
        self.decays = [draw.choice([None, 0.0, 1e-4, 0.05, 0.5]) for _ in range(NUM_STEPS)]
        self.clip = draw.choice([None, 0.5])

    def weights(self) -> list[Array]:
        generator = np.random.default_rng(self.seed)
        shapes: list[tuple[int, ...]] = [(2, 3), (4,), ()]
        return [np.asarray(generator.normal(0, self.size, shape), np.float32) for shape in shapes]

    def grads(self, step: int) -> list[Array]:
        generator = np.random.default_rng([self.seed, step])
        return [np.asarray(generator.normal(0, self.grad_size, each.shape), np.float32) for each in self.weights()]

    def rate(self, step: int) -> float:
        return self.lr if step < NUM_STEPS // 2 else self.lr / 10


def nnabla_step(kept: Kept, weight: Array, grad: Array, setting: Setting, *, lr: float, decay: float) -> Array:
    beta1, beta2 = map(np.float32, setting.betas)
    eps, (least, greatest) = np.float32(setting.eps), map(np.float32, setting.bounds)
    kept.take(grad, beta1, beta2)
    mean, var = kept.corrected(beta1, beta2, correct=setting.correct)
    update = mean / (np.sqrt(var) + eps) + np.float32(decay) * weight
    size, length = np.float32(np.linalg.norm(weight)), np.float32(np.linalg.norm(update))
    size = min(max(size, least), greatest)
    ratio = size / length if length > eps else np.float32(1)
    return np.asarray(weight - np.float32(lr) * ratio * update, np.float32)


def mxnet_step(kept: Kept, weight: Array, grad: Array, setting: Setting, *, lr: float, decay: float) -> Array:
    beta1, beta2 = map(np.float32, setting.betas)
    if setting.clip is not None:
        grad = np.clip(grad, -setting.clip, setting.clip)
    kept.take(grad, beta1, beta2)
    mean, var = kept.corrected(beta1, beta2, correct=setting.correct)
    update = mean / (np.sqrt(var) + np.float32(setting.eps)) + np.float32(decay) * weight
    size, length = np.float32(np.linalg.norm(weight)), np.float32(np.linalg.norm(update))
    if setting.bounds[0] > 0:
        size = max(size, np.float32(setting.bounds[0]))
    if setting.bounds[1] > 0:
        size = min(size, np.float32(setting.bounds[1]))
    ratio = np.float32(1) if size == 0 or length == 0 else size / length
    return np.asarray(weight - np.float32(lr) * ratio * update, np.float32)


def fresh(weights: list[Array]) -> list[Kept]:
    return [Kept(np.zeros_like(weight), np.zeros_like(weight)) for weight in weights]


def parameters_of(weights: list[Array]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor(weight)) for weight in weights]


def nnabla_solver(setting: Setting, parameters: list[torch.nn.Parameter]) -> Lamb:
    return Lamb(parameters, setting.lr, *setting.betas, *setting.bounds, setting.eps, setting.correct)


def assert_near(ours: list[torch.nn.Parameter], theirs: list[Array]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        size = np.abs(other)
        assert np.all(np.abs(mine.detach().numpy() - other) <= TOLERANCE * (size + 1e-3 + 0.1 * size.max()))


@pytest.mark.parametrize("seed", range(60))
def test_nnablas_lamb(seed: int) -> None:
    setting = Setting(seed)
    weights = setting.weights()
    parameters, kept = parameters_of(weights), fresh(weights)
    solver = nnabla_solver(setting, parameters)
    for step in range(NUM_STEPS):
        grads, decay = setting.grads(step), setting.decays[step]
        skipped = step % 4  # of 3 parameters: in every fourth step none
        for index, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            parameter.grad = None if index == skipped else torch.tensor(grad)
        solver.set_learning_rate(setting.rate(step))
        if decay is not None:
            solver.weight_decay(decay)
        solver.update()
        for index, grad in enumerate(grads):
            if index != skipped:
                rates = {"lr": setting.rate(step), "decay": decay or 0.0}
                weights[index] = nnabla_step(kept[index], weights[index], grad, setting, **rates)
        assert_near(parameters, weights)
        assert [solver.count(parameter) for parameter in parameters] == [each.count for each in kept]


@pytest.mark.parametrize("seed", range(60))
def test_mxnets_lamb(seed: int) -> None:
    setting = Setting(seed)
    names, decay = ["a_weight", "b_bias", "c_gamma"], setting.decays[0] or 0.0
    options = {
        **dict(zip(("beta1", "beta2"), setting.betas, strict=True)),
        **dict(zip(("lower_bound", "upper_bound"), setting.bounds, strict=True)),
        **({} if setting.clip is None else {"clip_gradient": setting.clip}),
        "epsilon": setting.eps,
        "bias_correction": setting.correct,
        "wd": decay,
        "learning_rate": setting.lr,
    }
    weights = setting.weights()
    parameters, kept = parameters_of(weights), fresh(weights)
    optimizer = optimizer_of("lamb", options, parameters, names)
    for step in range(NUM_STEPS):
        grads = setting.grads(step)
        set_rate(optimizer, setting.rate(step))
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = torch.tensor(grad)
        optimizer.step()
        for index, (name, grad) in enumerate(zip(names, grads, strict=True)):
            rates = {"lr": setting.rate(step), "decay": 0.0 if name == "b_bias" else decay}
            weights[index] = mxnet_step(kept[index], weights[index], grad, setting, **rates)
        assert_near(parameters, weights)


def edge(seed: int = 0, **numbers: Any) -> Setting:
    setting = Setting(seed)
    usual = {"bounds": (0.0, 10.0), "eps": 1e-6, "correct": True, "clip": None, **numbers}
    for name, value in usual.items():
        setattr(setting, name, value)
    return setting


def test_a_parameter_of_zeros_leaves_zero_as_mxnets_does_and_nnablas_never() -> None:
    setting = edge()
    zeros, grad = np.zeros(4, np.float32), setting.grads(0)[1]
    (parameter,) = parameters_of([zeros])
    parameter.grad = torch.tensor(grad)
    nnabla_solver(setting, [parameter]).update()
    (kept,), (other,) = fresh([zeros]), fresh([zeros])
    assert not nnabla_step(kept, zeros, grad, setting, lr=setting.lr, decay=0.0).any()
    assert_near([parameter], [mxnet_step(other, zeros, grad, setting, lr=setting.lr, decay=0.0)])


def test_a_step_shorter_than_epsilon_stays_short_as_nnablas_does_and_mxnets_not() -> None:
    setting = edge(grad_size=1e-14, size=1.0)
    weight, grad = setting.weights()[1], setting.grads(0)[1]
    (parameter,) = parameters_of([weight])
    parameter.grad = torch.tensor(grad)
    nnabla_solver(setting, [parameter]).update()
    (kept,), (other,) = fresh([weight]), fresh([weight])
    assert_near([parameter], [nnabla_step(kept, weight, grad, setting, lr=setting.lr, decay=0.0)])
    moved = mxnet_step(other, weight, grad, setting, lr=setting.lr, decay=0.0) - weight
    assert math.isclose(np.linalg.norm(moved), setting.lr * np.linalg.norm(weight), rel_tol=1e-4)
