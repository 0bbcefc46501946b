"""Share out optimizers over ranks: decide which, step what this rank owns, and gather the weights of all ranks."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.communicators import Communicator
from lockstep.digest import digest
from lockstep.errors import LockstepError
from lockstep.optim import HookedOptimizer
from lockstep.precision import asks_for_closure, parameters_of
from lockstep.updaters.ranks.coordinator import describe_error, raise_error
from lockstep.updaters.ranks.rank_reduction import RankReduction
from lockstep.updaters.state.checkpoint import copy_state
from lockstep.updaters.state.sharding import ShardedState, moving, refuse_named_state
from lockstep.updaters.state.training import TrainingState
from lockstep.updaters.step.stepping import (
    Part,
    RunOnDevices,
    StepProgress,
    balance,
    bare_step,
    can_step_in_parts,
    partial_view,
    step_in_parts,
)

NUM_CHECKED: Final = 2
"""The number of first steps of an unknown optimizer that are compared with whole ones. The second one shows state that
is kept where no rank gathers it."""
CHECKED_AGAIN: Final = 8
"""The number of steps after which one is compared again, and again after twice as many: a warm-up may have ended."""


def steps_elements(optimizer: Optimizer) -> bool:
    """Return whether the step of an optimizer is known to be elementwise, with the same bits on pieces of parameters.

    Args:
        optimizer: The optimizer.
    """
    return can_step_in_parts(optimizer) and (not isinstance(optimizer, HookedOptimizer) or optimizer.is_elementwise)


class SharedStep:
    """Steps an optimizer that the ranks share out.

    Args:
        sharded: What this rank owns, and its state.
        communicator: The communicator of the run.
    """

    def __init__(self, sharded: ShardedState, communicator: Communicator) -> None:
        self._sharded = sharded
        self._communicator = communicator
        self._is_known = steps_elements(sharded.optimizer)
        self._num_steps = 0
        self._owes_message = False

    def prepare(self) -> None:
        """Share out new parameters, and cut loaded state, while the groups hold the parameters of the model."""
        self._sharded.share_out()

    def step(
        self, current: Sequence[torch.Tensor], num_devices: int, run: RunOnDevices, progress: StepProgress
    ) -> None:
        """Step what this rank owns, and copy the weights of all ranks to each. Collective.

        Args:
            current: What the groups hold: the parameters, or their master weights.
            num_devices: The number of threads that the step is split over.
            run: Runs a function of an index on all threads at once.
            progress: Records how far the step has come.

        Raises:
            ValueError: If a gradient is sparse, or pieces of a parameter cannot be stepped alone; nothing has changed.
            PeerError: If another rank raised before the first weight moved.
            LockstepError: If another rank raised afterwards.
        """
        number = self._num_steps
        is_checked = number < NUM_CHECKED or (number >= CHECKED_AGAIN and number.bit_count() == 1)
        whole = WholeStep(self._sharded, current) if is_checked and not self._is_known else None
        self._owes_message = True
        try:
            begin = partial(self._begin, current, num_devices, whole)
            step_in_parts(self._sharded.optimizer, begin, run, progress)
            self._num_steps += 1
        except BaseException as error:
            # The others wait for a message.
            if self._owes_message:
                self._exchange(error)
            # A step that was taken back has moved nothing.
            progress.has_begun = progress.has_begun and not (whole is not None and whole.is_undone)
            raise

    def _begin(
        self, current: Sequence[torch.Tensor], num_devices: int, whole: WholeStep | None
    ) -> tuple[list[Part], Callable[[], None]]:
        """Return what the threads of this rank step, once every rank is about to, and what ends the step."""
        sharded = self._sharded
        moves = moving(sharded.optimizer)
        for tensor in current:
            if tensor.grad is not None and tensor.grad.is_sparse:
                raise ValueError(
                    "`shard_optimizer` must be False for sparse gradients, which cannot be cut, got one of shape "
                    f"{tuple(tensor.shape)}."
                )
        pieces = sharded.pieces(current)
        state = sharded.state_of(pieces)
        # The last point at which a rank that raises leaves everything as it was on all ranks.
        for rank, message in enumerate(self._exchange(None)):
            raise_error(rank, message)
        self._owes_message = True
        if whole is not None:
            whole.step()
        stepped = {id(each): piece for each, piece in zip(current, pieces, strict=True) if piece is not None}

        def end() -> None:
            for rank, message in enumerate(self._exchange(None)):
                if "error" in message:
                    raise LockstepError(
                        f"Rank {rank} raised {message['error']} between the first weight that moved and the last. Load "
                        "a saved state."
                    )
            # Gather the weights that all ranks have stepped.
            chosen = [index for index, each in enumerate(moves) if each]
            moved = [current[index] for index in chosen]
            sharded.gather([sharded.held[index] for index in chosen], moved)
            torch.autograd.graph.increment_version(moved)
            sharded.keep(pieces, state)
            if whole is not None:
                whole.check()

        return balance(stepped, num_devices, state), end

    def _exchange(self, error: BaseException | None) -> list[dict[str, Any]]:
        """Send an error to every rank, or that there is none, and return what all ranks have sent."""
        self._owes_message = False
        own = {} if error is None else describe_error(error, phase="optimizer")
        return self._communicator.exchange_json(own)


class WholeStep:
    """The step of whole parameters on copies, with which that of the pieces is compared.

    Args:
        sharded: What this rank owns, and its state.
        current: What the groups hold: the parameters, or their master weights.

    Attributes:
        is_undone: Whether the step was taken back.
    """

    def __init__(self, sharded: ShardedState, current: Sequence[torch.Tensor]) -> None:
        self._sharded, self._current = sharded, current
        self.is_undone = False
        self._before: list[torch.Tensor] = []
        self._own: dict[torch.Tensor, dict[str, Any]] | None = None
        self._options: list[dict[str, Any]] = []
        self._result = ""

    @torch.no_grad()
    def step(self) -> None:
        """Step copies of all parameters and of their state. Collective."""
        sharded, optimizer = self._sharded, self._sharded.optimizer
        self._before = [each.detach().clone() for each in self._current]
        self._own = copy_state(sharded.own_state())
        self._options = [_options_of(group) for group in optimizer.param_groups]
        copies = {id(each): torch.nn.Parameter(each.detach().clone(), each.requires_grad) for each in self._current}
        for each in self._current:
            copies[id(each)].grad = None if each.grad is None else each.grad.clone()
        gathered = sharded.gathered(sharded.held)
        pairs = zip(sharded.held, self._current, strict=True)
        known: dict[torch.Tensor, Any] = {
            copies[id(each)]: gathered[parameter] for parameter, each in pairs if parameter in gathered
        }
        twin = partial_view(optimizer, Part(copies, defaultdict(dict, known)))
        for group, options in zip(twin.param_groups, copy.deepcopy(self._options), strict=True):
            group.update(options)
        # What the step draws is drawn again by the step of the pieces.
        random = torch.get_rng_state()
        bare_step(twin)
        torch.set_rng_state(random)
        refuse_named_state(twin)
        whole = [copies[id(each)] for each in self._current]
        self._result = digest([each.detach() for each in whole], [dict(twin.state.get(each, {})) for each in whole])
        self._result += repr([_options_of(group) for group in twin.param_groups])

    @torch.no_grad()
    def check(self) -> None:
        """Check that the step of the pieces has led to the same bits. Collective.

        Raises:
            ValueError: If it has not. Weights, state and options are those from before the step then.
        """
        sharded, optimizer = self._sharded, self._sharded.optimizer
        gathered = sharded.gathered(sharded.held)
        state = [gathered.get(each, {}) for each in sharded.held]
        options = repr([_options_of(group) for group in optimizer.param_groups])
        if self._result == digest([each.detach() for each in self._current], state) + options:
            return
        for each, before in zip(self._current, self._before, strict=True):
            each.copy_(before)
        sharded.restore(self._own)
        for group, before_step in zip(optimizer.param_groups, self._options, strict=True):
            group.update(before_step)
        self.is_undone = True
        raise ValueError(
            f"`shard_optimizer` must be False for {type(optimizer).__name__}: its step of pieces of parameters has "
            "other bits than its step of whole ones. Nothing has changed."
        )


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


LOG = logging.getLogger("lockstep")

ShardOptimizer: TypeAlias = 'Literal["auto", True, False]'

LARGE: Final = 8_000_000
"""Elements. Optimizers of fewer parameters are not shared out by default, because they would gain nothing."""

_NOT_CUT: Final = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})
"""Optimizers of PyTorch that look at whole parameters, or at all of them."""


def check_shardable(chosen: object, optimizers: Mapping[str, Optimizer], model: nn.Module) -> None:
    """Check that every optimizer can be shared out, if that is asked for.

    Args:
        chosen: The argument `shard_optimizer` of the updater.
        optimizers: The optimizers by name.
        model: All networks.

    Raises:
        ValueError: If the argument is out of range, or an optimizer cannot be shared out.
    """
    if not isinstance(chosen, bool) and chosen != "auto":
        raise ValueError(f"`shard_optimizer` must be True, False or 'auto', got {chosen!r}.")
    for name, optimizer in optimizers.items() if chosen is True else ():
        reason = why_whole(optimizer, model)
        if reason is not None:
            raise ValueError(
                f"`shard_optimizer` must be False or 'auto' for the {type(optimizer).__name__} {name!r}, which "
                f"{reason}."
            )


def why_whole(optimizer: Optimizer, model: nn.Module) -> str | None:
    """Return why an optimizer cannot be shared out; None if it can, or if only its first steps can tell.

    Args:
        optimizer: The optimizer.
        model: All networks.
    """
    kind = type(optimizer)
    if asks_for_closure(optimizer) or (kind.__module__.startswith("torch.") and kind.__name__ in _NOT_CUT):
        return "looks at whole parameters or at all of them, of which no piece can be stepped alone"
    if can_step_in_parts(optimizer) and not steps_elements(optimizer):
        return "looks at whole parameters, of which no piece can be stepped alone"
    if any(isinstance(each, Optimizer) for each in vars(optimizer).values()):
        return "holds another optimizer, whose state is not known here"
    held = set(map(id, parameters_of(optimizer)))
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) is True and any(id(each) in held for each in module.parameters()):
            return f"has sparse gradients of {path!r}, which cannot be cut"
    for group in optimizer.param_groups:
        for name, value in group.items():
            # One per element.
            if name != "params" and isinstance(value, torch.Tensor) and value.numel() > 1:
                return f"has a tensor of shape {tuple(value.shape)} as its option {name!r}, which cannot be cut"
    return None


def share_out(
    training: TrainingState, communicator: Communicator, chosen: ShardOptimizer, ranks: RankReduction
) -> dict[str, SharedStep]:
    """Share out the optimizers of a run over its ranks, where that is chosen.

    Args:
        training: The training state, which gets what this rank holds of the state of each.
        communicator: The communicator of the run.
        chosen: The argument `shard_optimizer` of the updater.
        ranks: The reduction over ranks. By default, if they are on several machines, no more is sent than without
            sharing.

    Returns:
        The steps of the optimizers that are shared out, by name.
    """
    if chosen is False:
        return {}
    model, shared = training.replicas.model, {}
    for name, optimizer in training.optimizers.items():
        if chosen == "auto" and not (ranks.one_machine and _gains(optimizer) and why_whole(optimizer, model) is None):
            continue
        training.sharded[name] = ShardedState(optimizer, communicator, ranks.coordinator.start_gather)
        shared[name] = SharedStep(training.sharded[name], communicator)
    if shared and communicator.rank == 0:
        LOG.info(
            "Each of the %d ranks steps its part of the weights and holds the state of %s for it. `state_dict` is a "
            "call of all ranks, and if a rank is lost the run goes on from its newest snapshot, because no rank has "
            "the whole state. `shard_optimizer=False` keeps all of it on every rank, with the same bits.",
            communicator.size,
            ", ".join(map(repr, shared)),
        )
    return shared


def _gains(optimizer: Optimizer) -> bool:
    """Return whether sharing out is safe and worth it without being asked for."""
    parameters = parameters_of(optimizer)
    if not steps_elements(optimizer) or any(map(is_lazy, parameters)):
        return False
    size: int = sum(each.numel() for each in parameters if each.requires_grad)
    return size >= LARGE
