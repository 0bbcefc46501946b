"""The state of an optimizer that is shared out over ranks: each rank steps the elements that it owns.

Every rank holds all weights, and the state of its own elements only. `plan.slices` decides which elements a rank owns.
Between steps the groups of the optimizer hold the parameters as usual, and its own state is empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.communicators import Communicator
from lockstep.errors import OrderError
from lockstep.optim import HookedOptimizer
from lockstep.plan import slices
from lockstep.precision import parameters_of
from lockstep.state import temporarily
from lockstep.strides import is_dense, laid_out_for

ParameterState: TypeAlias = "dict[str, Any]"
"""What an optimizer remembers of one parameter."""

Owners: TypeAlias = "list[range | None]"
"""The elements of a parameter that each rank owns, in the order of memory; None for a rank that owns nothing of it."""

CURE = (
    "its state is shared out over the ranks: step it by the updater, read its state by `state_dict()` of the updater "
    "on every rank, or pass `shard_optimizer=False`."
)


class SharedOutState(defaultdict[Tensor, ParameterState]):
    """The state that an optimizer shows between steps: no step can begin with it, and nothing can be read.

    Code of this library reads it, as an empty one, by the methods of `dict`.

    Attributes:
        owned: The elements of each parameter that the ranks own.
        pieces: The state of what this rank owns, by parameter. It is that of all updaters with this optimizer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owned: dict[Tensor, Owners] = {}
        self.pieces: dict[Tensor, ParameterState] = {}

    def _refuse(self, *_: object, **__: object) -> Any:
        raise OrderError(f"The optimizer must not be stepped or read directly, because {CURE}")

    __missing__ = __contains__ = __iter__ = __len__ = __setitem__ = __delitem__ = _refuse
    get = items = values = keys = pop = popitem = setdefault = update = clear = _refuse


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor in a description of state.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        on_host: Whether it is in host memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool


class ShardedState:
    """The elements of the parameters of an optimizer that this rank owns, and their state.

    A parameter is cut where it is dense, at multiples of `plan.ALIGNMENT` elements in the order of memory. Parameters
    of groups that are added later are shared out among themselves, so that no element ever changes its owner.

    Args:
        optimizer: The optimizer, whose groups always hold whole parameters.
        communicator: The communicator of the run.
        start_gather: Called before state is gathered; raises if a rank does something else.

    Determinism: elementwise operations on the pieces give the bits of those on whole parameters.
    """

    def __init__(self, optimizer: Optimizer, communicator: Communicator, start_gather: Callable[[], object]) -> None:
        self.optimizer = optimizer
        self._communicator = communicator
        self._start_gather = start_gather
        self._shared = SharedOutState()
        self.held: list[Tensor] = []
        """The parameters of the model that were shared out last; meanwhile the groups may hold master weights."""

    def share_out(self) -> None:
        """Share out parameters that have no owner yet, and cut state that the optimizer was given or has loaded.

        Call this while the groups hold the parameters of the model, and not master weights.
        """
        given = self.optimizer.state
        # Another updater may have shared it out, before or after this one was built.
        if isinstance(given, SharedOutState):
            self._shared = given
        self.held = parameters = parameters_of(self.optimizer)
        new = [parameter for parameter in parameters if parameter not in self._shared.owned]
        # Apart, because frozen parameters need no state.
        for some in ([each for each in new if each.requires_grad], [each for each in new if not each.requires_grad]):
            self._shared.owned.update(zip(some, share(some, self._communicator.size), strict=True))
        if isinstance(given, SharedOutState):
            return
        refuse_named_state(self.optimizer)
        self._shared.pieces = {}
        for parameter in parameters:
            if parameter in given and self._own(parameter) is not None:
                cut = {key: self._cut(parameter, value) for key, value in given[parameter].items()}
                self._shared.pieces[parameter] = cut
        self.optimizer.state = self._shared

    def _own(self, parameter: Tensor) -> range | None:
        """Return the elements of a parameter that this rank owns; None if it owns nothing of it."""
        return self._shared.owned[parameter][self._communicator.rank]

    def _cut(self, parameter: Tensor, value: Any) -> Any:
        """Return the part of a value in the state of a parameter that belongs to the elements of this rank."""
        own = self._own(parameter)
        if (
            own is None
            or len(own) == parameter.numel()
            or not isinstance(value, Tensor)
            or value.shape != parameter.shape
        ):
            return value
        return flat(laid_out_for(parameter, value))[own.start : own.stop].clone()

    def pieces(self, current: Sequence[Tensor]) -> list[Tensor | None]:
        """Return what this rank steps in place of each parameter, with its gradient; None where it owns nothing.

        Args:
            current: What the groups hold now: the parameters, or their master weights.
        """
        return [self._piece(each, self._own(parameter)) for parameter, each in zip(self.held, current, strict=True)]

    def _piece(self, tensor: Tensor, own: range | None) -> Tensor | None:
        if own is None:
            return None
        if len(own) == tensor.numel():
            return tensor
        piece = nn.Parameter(flat(tensor)[own.start : own.stop], requires_grad=tensor.requires_grad)
        if tensor.grad is not None:
            piece.grad = flat(laid_out_for(tensor, tensor.grad))[own.start : own.stop]
        return piece

    def state_of(self, pieces: Sequence[Tensor | None]) -> defaultdict[Tensor, Any]:
        """Return the state of pieces, as an optimizer holds it during a step."""
        known, pairs = self._shared.pieces, zip(self.held, pieces, strict=True)
        return defaultdict(dict, {piece: known[each] for each, piece in pairs if piece is not None and each in known})

    def keep(self, pieces: Sequence[Tensor | None], state: dict[Tensor, ParameterState]) -> None:
        """Keep the state of pieces after a step."""
        pairs = zip(self.held, pieces, strict=True)
        self._shared.pieces = {each: state[piece] for each, piece in pairs if piece is not None and piece in state}

    def gather(self, parameters: Sequence[Tensor], stepped: Sequence[Tensor]) -> None:
        """Copy to every rank what each rank has stepped. Collective.

        Args:
            parameters: The parameters of the model.
            stepped: For each parameter, what holds the stepped elements of this rank: itself or its master weight.
        """
        parts: list[list[Tensor]] = [[] for _ in range(self._communicator.size)]
        copies: list[tuple[Tensor, Tensor]] = []
        for parameter, tensor in zip(parameters, stepped, strict=True):
            elements = tensor.detach()
            if not is_dense(tensor):
                elements = elements.contiguous()
                copies.append((tensor, elements))
            for part, own in zip(parts, self._shared.owned[parameter], strict=True):
                if own is not None:
                    part.append(flat(elements)[own.start : own.stop])
        self._communicator.gather_owned(parts)
        for tensor, elements in copies:
            tensor.detach().copy_(elements)

    # Whole state ---------------------------------------------------------------------------------

    def whole(self) -> AbstractContextManager[None]:
        """Return a context in which the optimizer holds the whole state. Collective, once a step has been taken."""
        if not isinstance(self.optimizer.state, SharedOutState):
            return nullcontext()
        self._start_gather()
        return temporarily(self.optimizer, state=self.gathered(parameters_of(self.optimizer)))

    def without_state(self) -> AbstractContextManager[None]:
        """Return a context in which the optimizer holds no state, so that its options can be read alone."""
        is_shared = isinstance(self.optimizer.state, SharedOutState)
        return temporarily(self.optimizer, state=defaultdict(dict)) if is_shared else nullcontext()

    def own_state(self) -> dict[Tensor, ParameterState] | None:
        """Return the state of this rank by parameter; None while the optimizer holds a state that was not cut yet."""
        return self._shared.pieces if isinstance(self.optimizer.state, SharedOutState) else None

    def restore(self, state: dict[Tensor, ParameterState] | None) -> None:
        """Restore a state that `own_state` has returned."""
        self._shared.pieces = state or {}
        if state is not None:
            self.optimizer.state = self._shared

    def gathered(self, parameters: Sequence[Tensor]) -> defaultdict[Tensor, ParameterState]:
        """Return the whole state of parameters of the model, in new memory. Collective.

        Args:
            parameters: The parameters.
        """
        ranks = self._communicator.gather_objects([_described(self._shared.pieces.get(each)) for each in parameters])
        found: defaultdict[Tensor, ParameterState] = defaultdict(dict)
        parts: list[list[Tensor]] = [[] for _ in ranks]
        for index, parameter in enumerate(parameters):
            # All owners have the same entries. One that no step has moved yet has none.
            owners = [(rank, own) for rank, own in enumerate(self._shared.owned.get(parameter, [])) if own is not None]
            described = ranks[owners[0][0]][index] if owners else None
            if described is not None:
                # Also an empty one, as some optimizers leave it.
                found[parameter] = {}
            for key, about in (described or {}).items():
                if not isinstance(about, Described):
                    found[parameter][key] = about
                    continue
                whole, views = _memory_for(parameter, about, owners)
                found[parameter][key] = whole
                for rank, view in views:
                    parts[rank].append(view)
                    if rank == self._communicator.rank:
                        mine = self._shared.pieces[parameter][key]
                        view.copy_(mine if view.shape == mine.shape else flat(laid_out_for(whole, mine)))
        self._communicator.gather_owned(parts)
        return found


def _memory_for(
    parameter: Tensor, about: Described, owners: Sequence[tuple[int, range]]
) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """Return memory for one value of the state of a parameter, and views of what each rank has of it."""
    device = "cpu" if about.on_host else parameter.device
    first, own = owners[0]
    is_cut = about.shape == (len(own),) and len(own) < parameter.numel()
    if is_cut or about.shape == parameter.shape:
        whole = torch.empty_like(parameter, dtype=about.dtype, device=device, requires_grad=False)
    else:
        whole = torch.empty(about.shape, dtype=about.dtype, device=device)
    if is_cut:
        return whole, [(rank, flat(whole)[own.start : own.stop]) for rank, own in owners]
    # The state of a parameter that is not cut, or a number such as the count of steps, which all owners have.
    return whole, [(first, flat(whole))]


def share(tensors: Sequence[Tensor], num_ranks: int) -> list[Owners]:
    """Return for each tensor the elements that each rank owns, in the order of memory.

    Args:
        tensors: The tensors. Those that are not dense are not cut.
        num_ranks: The number of ranks.
    """
    shared: list[Owners] = [[None] * num_ranks for _ in tensors]
    dense = [index for index, tensor in enumerate(tensors) if is_dense(tensor)]
    loads = [0] * num_ranks
    for rank, pieces in enumerate(slices([tensors[index].numel() for index in dense], num_ranks)):
        for piece in pieces:
            shared[dense[piece.tensor]][rank] = range(piece.start, piece.stop)
            loads[rank] += piece.stop - piece.start
    # Empty tensors and those that are not dense.
    for owners, tensor in zip(shared, tensors, strict=True):
        if owners == [None] * num_ranks:
            rank = loads.index(min(loads))
            owners[rank] = range(tensor.numel())
            loads[rank] += tensor.numel()
    return shared


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of memory, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _described(state: ParameterState | None) -> dict[str, Any] | None:
    """Replace the tensors of a state by descriptions; None if there is no state."""
    if state is None:
        return None
    return {
        key: Described(value.dtype, tuple(value.shape), value.device.type == "cpu")
        if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }


def refuse_named_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer with state under a name, which no rank would own.

    Args:
        optimizer: The optimizer, which holds its whole state.

    Raises:
        ValueError: If it has such state.
    """
    for key in optimizer.state:
        if not isinstance(key, Tensor):
            raise ValueError(  # noqa: TRY004 - the argument has a value that does not fit
                f"`shard_optimizer` must be False for {type(optimizer).__name__}, which keeps state that belongs to no "
                f"parameter, got {key!r}. Nothing has changed."
            )


def moving(optimizer: Optimizer) -> list[bool]:
    """Return for each parameter in the groups of an optimizer whether a step moves it: on every rank the same."""
    if isinstance(optimizer, HookedOptimizer):
        optimizer.fill_missing_grads()
    return [
        parameter.grad is not None and not group.get("frozen")
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
