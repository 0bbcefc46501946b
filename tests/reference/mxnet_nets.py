"""The networks of MXNet's traces, with parameters by the original's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from traces import Case, tensor


class _SoftmaxOutput(torch.autograd.Function):
    """MXNet's loss layer: gives probabilities; its gradient is that of the summed cross-entropy, always."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        probabilities = scores.softmax(1)
        ctx.save_for_backward(probabilities, label)
        return probabilities

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        probabilities, label = ctx.saved_tensors
        return probabilities - functional.one_hot(label.long(), probabilities.shape[1]), None


class _LinearRegressionOutput(torch.autograd.Function):
    """MXNet's loss layer: gives its input; its gradient is the difference, over the values of a sample."""

    @staticmethod
    def forward(ctx: Any, predicted: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(predicted, label)
        return predicted.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        predicted, label = ctx.saved_tensors
        return (predicted - label) / predicted[0].numel(), None


def softmax_output(scores: torch.Tensor, label: torch.Tensor | None) -> torch.Tensor:
    """Give probabilities; without labels there is nothing to learn."""
    label = torch.zeros(len(scores)) if label is None else label
    probabilities: torch.Tensor = _SoftmaxOutput.apply(scores, label)
    return probabilities


def regression_output(predicted: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _LinearRegressionOutput.apply(predicted, label)
    return result


class Net(nn.Module):
    """A network whose parameters have MXNet's names."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.function = forward

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self, *inputs)


def mlp_softmax(net: Any, data: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
    hidden = torch.tanh(functional.linear(data, net.fc1_weight, net.fc1_bias))
    return softmax_output(functional.linear(hidden, net.fc2_weight, net.fc2_bias), label)


def linear_regression(net: Any, data: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return regression_output(functional.linear(data, net.fc1_weight, net.fc1_bias), label)


def convnet_softmax(net: Any, data: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    hidden = functional.conv2d(data, net.conv1_weight, net.conv1_bias, padding=1).relu()
    pooled = functional.max_pool2d(hidden, 2, 2).flatten(1)
    return softmax_output(functional.linear(pooled, net.fc1_weight, net.fc1_bias), label)


class BatchNormMlp(Net):
    """Batch normalisation as MXNet has it: the running variance is the biased one."""

    bn_moving_mean: torch.Tensor
    bn_moving_var: torch.Tensor

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(shapes, batchnorm_mlp)
        size = shapes["bn_gamma"]
        self.register_buffer("bn_moving_mean", torch.zeros(size))
        self.register_buffer("bn_moving_var", torch.ones(size))


def batchnorm_mlp(net: Any, data: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    hidden = functional.linear(data, net.fc1_weight, net.fc1_bias)
    if net.training:
        mean, var = hidden.mean(0), hidden.var(0, correction=0)
        with torch.no_grad():
            net.bn_moving_mean.mul_(0.9).add_(mean, alpha=0.1)
            net.bn_moving_var.mul_(0.9).add_(var, alpha=0.1)
    else:
        mean, var = net.bn_moving_mean, net.bn_moving_var
    normal = (hidden - mean) / (var + 1e-3).sqrt() * net.bn_gamma + net.bn_beta
    return softmax_output(functional.linear(normal.tanh(), net.fc2_weight, net.fc2_bias), label)


def build(init: Mapping[str, Any]) -> Net:
    """Build the network that has parameters of these names, in the recorded shapes."""
    shapes = {parameter: tuple(array["shape"]) for parameter, array in init.items()}
    if "bn_gamma" in shapes:
        return BatchNormMlp(shapes)
    if "conv1_weight" in shapes:
        return Net(shapes, convnet_softmax)
    return Net(shapes, mlp_softmax if "fc2_weight" in shapes else linear_regression)


class Tanh(nn.Module):
    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data.tanh()


class ThreeOutputs(nn.Module):
    def forward(
        self, b: torch.Tensor, shared: torch.Tensor, a: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return a * shared, b.tanh(), shared.square()


def model_of(case: Case) -> nn.Module:
    """Build the network of a case: by its parameters, or by what it puts out where it has none."""
    if case["param_names"]:
        return build(next(step["arg_params"] for step in case["steps"] if step["op"] == "set_params"))
    return Tanh() if len(case["output_names"]) == 1 else ThreeOutputs()


def arrays(recorded: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Make tensors of recorded arrays by name."""
    return {name: tensor(array) for name, array in recorded.items()}
