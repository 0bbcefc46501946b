"""Hand the batch's gradient over to the parameters, with the hooks that belong to a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from lockstep.replicas.gradients import hooked
from lockstep.strides import laid_out_for
from lockstep.tree import Tensors


def hand_over(
    parameters: Sequence[nn.Parameter],
    gradients: Tensors,
    *,
    frozen: Sequence[nn.Parameter],
    receiver: Callable[[nn.Parameter], nn.Parameter],
) -> None:
    """Put the gradient of the whole batch where an optimizer looks for it.

    Hooks that the user registered on a parameter see it once, as they would in a loop of one's own.

    Args:
        parameters: Those the gradients are for.
        gradients: One for each, or None.
        frozen: Parameters that ask for no gradient. One that did so before has a gradient of its last update,
            by which an optimizer would move it.
        receiver: Says for a parameter whose ``grad`` the optimizer reads: its own or its master's.
    """
    for parameter in frozen:
        parameter.grad = None
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            gradient = hooked(parameter, gradient)  # noqa: PLW2901 - a hook's answer stands in for it
        target = receiver(parameter)
        # A half-precision parameter without a master is nobody's; its gradient comes in float32 all the same.
        # What came from other ranks or out of a hook may lie otherwise than the weight, which fused kernels
        # do not notice.
        target.grad = None if gradient is None else laid_out_for(target, gradient.to(target.dtype))


def refuse_accumulate_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse hooks that wait for an accumulation of gradients, which replicas do not have.

    Raises:
        ValueError: A parameter has such a hook.
    """
    for name, parameter in parameters.items():
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"`model` must have no post-accumulate-grad hooks, got one on {name!r}. A shard's gradient "
                "is not the batch's; use Tensor.register_hook or a hook of the optimizer."
            )
