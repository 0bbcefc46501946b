"""Audit an update: compute one shard once more in another place, and compare both results by their bits."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, get_args
from zlib import crc32

import torch

from lockstep.arguments import check_choice, check_integer
from lockstep.communicators import SumFault
from lockstep.digest import checksums
from lockstep.errors import DeterminismWarning, FaultError, RandomStreamWarning, few, warn
from lockstep.plan import Shard
from lockstep.replicas import CAUSES, BufferRef, BufferRules, note_left
from lockstep.streams import DRAWS, moved
from lockstep.updaters.detectors import GENERATORS, left_for

LOG = logging.getLogger("lockstep")

OnFault = Literal["raise", "repeat"]
"""What follows a shard that one place has computed wrongly: an error, or the same update once more."""

Place: TypeAlias = "tuple[int, int]"
"""A rank, and the index of one of its devices."""

Seals: TypeAlias = "tuple[float | None, ...]"
"""The checksums of what a shard has computed, in the order of `Audit.names`."""

Compute: TypeAlias = "Callable[[int], Seals | None]"
"""Computes the shard on a device of this process, and returns its checksums; None if it was left out."""

Exchange: TypeAlias = Callable[[Any], list[Any]]
"""Sends a message to every rank, and returns the messages of all."""

ATTRIBUTES: Final = "attributes of replicas that forward has changed "
"""What may decide from the second update on, and is found by a new copy of the model."""
TENSORS: Final = "tensors outside of the model that the loss function refers to "
"""What may decide from the second update on, such as a teacher that begins with the weights of the model."""

NEW_COPY: Final = "a new copy of the model, as a run that is resumed here has it"
"""What computes a shard once more in later audits, for messages."""

MAJORITY: Final = 2
"""The number of equal results by which others are known to be wrong."""

CURE: Final = (
    "Such a value depends on which device and rank computes which shard, and in which order, changes again when an "
    "update is repeated, and is not part of a saved state. Make a tensor a buffer of the model, or of a module that "
    "you pass among several models: its new values are averaged over the shards. Or change it once per update: in the "
    "criterion of a `BatchLoss`, which gets the outputs of all samples, or between updates, in an extension or a step "
    "function. Pass what belongs to positions in the batch as `carried`. Let a hook keep an output that the loss needs "
    "in an attribute of its module, of which each device has a copy. Call eval() of a network that is not trained, "
    "such as a teacher. Draw random numbers from torch without `generator=`, from the streams of the shards, or from "
    "a generator that the loss function creates: random.Random(torch.randint(2**31, ()).item())."
)


CHANGED: Final = f"While a shard was computed, this changed, which is no part of the model: {{}}. {CURE}"


def names_of_seals(parameters: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the names of what is compared, in the order in which `seals_of` is given it.

    Args:
        parameters: The names of the parameters.
        others: The names of buffers and carried values.
    """
    gradients = (f"the gradient of {name!r}" for name in parameters)
    return [*gradients, "the loss", *map(repr, others), "the weight of the loss"]


def seals_of(computed: Iterable[torch.Tensor | None], weight: float | torch.Tensor) -> Seals:
    """Return the checksums of what a shard has computed.

    Args:
        computed: The gradients, the loss, buffers and carried values.
        weight: The weight of the loss.
    """
    given = list(computed)
    found = iter(checksums([each for each in given if each is not None]))
    return *(None if each is None else next(found) for each in given), float(weight)


@dataclass(slots=True)
class Audit:
    """The shard of an attempt that is computed twice.

    Attributes:
        shard: The shard.
        place: The place that computes it for the update.
        other: The place that computes it once more; the same one where there is no other.
        spare: The place of a third computation, if the first two differ.
        rank: The rank of this process.
        turn: The number of audits before this one.
        names: What is compared: gradients by the names of their parameters, the loss, buffers and carried values.
        seals: The checksums of the first computation, by the index of the shard, on the rank that makes it.
        again: The checksums of the second one.
        states: Returns the states of what may move while shards are computed, by name; nothing where it is not asked.
        began: These states before the first shard of the attempt.
        others: Returns the states of tensors that the loss functions of other gradients refer to, by name.
        others_began: These states before the first shard of the attempt.
        before: These states before the second computation.
        drawn: The generators that moved in it.
        steps_by: The names of tensors that optimizers hold, beside what they keep by parameters.
        changed: Those of them that changed in it, and those of `others` that changed in the first one.
        neighbours: Two shards of this process by the index of the device, which are computed beside each other.
        given: Copies of tensors that cannot be read again and that this process has, by the index of the shard.
        compares_buffers: Whether averaged buffers are compared between shards.
        left: The checksums of these buffers after each shard, by name.
        renews: Whether the second computation is that of a new copy of the model.
        left_over: The names of the attributes in which the former copy differs from the new one.
        holds: What may decide from the next update on: `ATTRIBUTES`, `TENSORS`, both or nothing.
    """

    shard: Shard
    place: Place
    other: Place
    spare: Place
    rank: int
    turn: int = 0
    names: Sequence[str] = ()
    states: Callable[[], dict[str, object]] = dict
    began: dict[str, object] = field(default_factory=dict)
    others: Callable[[], dict[str, object]] = dict
    others_began: dict[str, object] = field(default_factory=dict)
    before: dict[str, object] = field(default_factory=dict)
    drawn: Sequence[str] = ()
    steps_by: Collection[str] = ()
    changed: list[str] = field(default_factory=list)
    seals: dict[int, Seals] = field(default_factory=dict)
    again: Seals | None = None
    neighbours: Mapping[int, Shard] = field(default_factory=dict)
    given: dict[int, Any] = field(default_factory=dict)
    compares_buffers: bool = False
    left: dict[str, set[int]] = field(default_factory=dict)
    renews: bool = False
    left_over: Sequence[str] = ()
    holds: str = ""

    @property
    def first(self) -> Seals | None:
        """The checksums of the first computation, on the rank that makes it."""
        return self.seals.get(self.shard.index)

    @property
    def compared(self) -> frozenset[int]:
        """The indices of the shards whose first computation is compared with another one."""
        return frozenset(each.index for each in (self.shard, *self.neighbours.values()))

    def run(self, compute: Compute) -> None:
        """Compute the shard once more, if that is the task of this rank.

        Args:
            compute: Computes the shard.
        """
        self.before, self.changed = self.states(), left_for(self.others_began, self.others())
        if self.other[0] == self.rank:
            self.again = compute(self.other[1])
            # A seed that every shard sets again moves nothing here, but other threads disturb it.
            seeded = moved(self.began, self.before) if self.neighbours else []
            # What a generator of Python or NumPy of your own decides, the results show.
            found = moved(self.before, self.states())
            self.drawn = [each for each in GENERATORS[:-1] if each in [*seeded, *found]]
            self.changed += [each for each in found if each in self.steps_by]

    @property
    def differs(self) -> bool:
        """Whether both computations are those of this rank and differ, so that something hidden decides."""
        return None not in (self.first, self.again) and self.first != self.again

    def note_buffers(self, refs: Sequence[BufferRef], left: Sequence[torch.Tensor | None], rules: BufferRules) -> None:
        """Keep the checksums of buffers that a shard has left, and that shards may disagree on, if they are compared.

        Args:
            refs: The buffers of the model.
            left: What the shard has left in each of them; None where it changed nothing.
            rules: The rules by which buffers of shards become one.
        """
        if self.compares_buffers:
            note_left(self.left, refs, left, rules)

    def to_plain(self) -> list[str | None]:
        """Return both results of this rank, and what may decide from the next update on, to be sent to other ranks."""
        seals = [None if each is None else f"{crc32(repr(each).encode()):08x}" for each in (self.first, self.again)]
        return [*seals, self.holds]

    def finding(
        self, compute: Compute, reports: Sequence[Sequence[str | None]] = (), exchange: Exchange | None = None
    ) -> Finding | None:
        """Compare both computations; if they differ, compute the shard again until it is known which is wrong.

        Args:
            compute: Computes the shard.
            reports: What each rank has returned by `to_plain`; none in a single process.
            exchange: Exchanges messages between the ranks; None in a single process.

        Returns:
            The finding; None if both are equal, or if one was left out after an interrupt.
        """
        pair = [[each for report in reports or [self.to_plain()] if (each := report[turn])] for turn in range(2)]
        if not all(pair) or pair[0][0] == pair[1][0]:
            return None
        votes = [(self.place, self._gather(self.first, exchange)), (self.other, self._gather(self.again, exchange))]
        if self.renews:
            return Finding.of(self, votes)
        # A third computation decides; where there are two places only, a fourth one tells a place that is always wrong
        # from one that was wrong once.
        for place in [self.spare, self.other] if self.spare == self.place != self.other else [self.spare]:
            found = compute(place[1]) if place[0] == self.rank else None
            votes.append((place, self._gather(found, exchange)))
        return replace(Finding.of(self, votes), moved=self.moved())

    def moved(self) -> list[str]:
        """Return the names of generators, and of tensors beside the model, that have moved since the attempt began."""
        after = self.states()
        # Where the same shard was computed last before, what it leaves behind is the same again.
        return moved(self.before, after) or moved(self.began, after)

    def _gather(self, own: Seals | None, exchange: Exchange | None) -> Seals | None:
        """Return the checksums that one of the ranks has."""
        if exchange is None:
            return own
        return next((tuple(each) for each in exchange(own) if each is not None), None)


@dataclass(frozen=True, slots=True)
class Finding:
    """What several computations of a shard say.

    Attributes:
        audit: The shard.
        differs: The first of `Audit.names` that differs.
        wrong: The places whose results differ from those of the majority; empty if there is no majority.
        is_repeatable: Whether any two of the computations agree.
        computations: The number of computations.
        moved: The names of generators, and of tensors beside the model, that moved in a computation.
    """

    audit: Audit
    differs: str
    wrong: Sequence[Place]
    is_repeatable: bool
    computations: int
    moved: Sequence[str] = ()

    @classmethod
    def of(cls, audit: Audit, votes: Sequence[tuple[Place, Seals | None]]) -> Finding:
        """Count the results.

        Args:
            audit: The shard.
            votes: What each computation has found, and where; the first two differ.
        """
        first, again = votes[0][1] or (), votes[1][1] or ()
        pairs = zip(audit.names, first, again, strict=False)
        differs = next((name for name, here, there in pairs if here != there), "its shape")
        (best, most), *others = Counter(seals for _, seals in votes).most_common()
        is_majority = most >= MAJORITY and others[0][1] < most
        wrong = sorted({place for place, seals in votes if seals != best}) if is_majority else []
        return cls(audit, differs, wrong, most >= MAJORITY, len(votes))

    def text(self, update: int, devices: Sequence[torch.device]) -> str:
        """Describe what was found.

        Args:
            update: The number of updates that are done.
            devices: The devices of this process.
        """
        audit = self.audit
        start = (
            f"In update {update} (counted from 0) shard {audit.shard.index} was computed {self.computations} times, "
            f"and the results differ in {self.differs}"
        )
        if audit.renews:
            return f"{start}: the second time by {NEW_COPY}."
        if not self.is_repeatable:
            return f"{start}: no two of them are equal."
        places = " and ".join(self.name_of(each, devices) for each in self.wrong)
        if self.wrong:
            return f"{start}: {places} computed other bits than the rest."
        one, other = (self.name_of(each, devices) for each in (audit.place, audit.other))
        return f"{start}: {one} and {other} each repeat their own result."

    def cause(self) -> str:
        """Return what is known of the cause, and the cure."""
        if self.audit.left_over:
            return f"Its forward has changed these attributes in earlier updates: {few(self.audit.left_over)}. {CURE}"
        if not self.moved:
            return CAUSES
        return CHANGED.format(few(self.moved))

    def name_of(self, place: Place, devices: Sequence[torch.device]) -> str:
        """Return the name of a place for a message."""
        rank, index = place
        device = f"{devices[index]} (device {index})" if rank == self.audit.rank else f"device {index}"
        return f"{device} of rank {rank}"

    def error(self, update: int, devices: Sequence[torch.device]) -> FaultError:
        """Return the error that names the place.

        Args:
            update: The number of updates that are done.
            devices: The devices of this process.
        """
        rank, index = self.wrong[0] if self.wrong else (None, None)
        device = None if index is None else str(devices[index]) if rank == self.audit.rank else f"device {index}"
        return FaultError(
            f"{self.text(update, devices)} The hardware is faulty, or the code depends on the place or the moment, "
            "which `lockstep verify` tells. Nothing of the update was applied. Continue from this state or from a "
            "snapshot without that device; a fault that passes is repeated with on_fault='repeat'.",
            update=update,
            shard=self.audit.shard.index,
            rank=rank,
            device=device,
        )


class Auditor:
    """Chooses what is audited, and what follows.

    Args:
        every: The number of updates after which one is audited; None for the first only, 0 for none.
        on_fault: What follows a wrong result. With ``every=None`` there is a warning instead.
        seed: The seed of the run, which decides with the update which shard of a place is audited.

    Raises:
        TypeError: If the number of updates is no integer.
        ValueError: If an argument is out of range.
    """

    def __init__(self, every: int | None, on_fault: OnFault, seed: int) -> None:
        if every is not None:
            check_integer("audit_every", every, minimum=0)
        check_choice("on_fault", on_fault, get_args(OnFault))
        self._every, self._on_fault, self._seed = every, on_fault, seed
        self._repeated: tuple[int, int] | None = None
        self.only_warns = every is None
        """Whether a difference is warned of."""
        self.has_warned = False
        """Whether a dependency was warned of, after which a difference says nothing new."""
        self.is_mixed = False
        """Whether devices are of several types, which round differently, so that each place audits itself."""
        self.next: float = math.inf
        """The next update that is audited, as the number of updates before it; also while that one runs."""
        self._end = 0

    @property
    def is_on(self) -> bool:
        """Whether any update is audited."""
        return self._every != 0

    def restart(self, update: int) -> None:
        """Audit the next update, if any is audited.

        Args:
            update: The number of updates that are done.
        """
        self.next = update if self.is_on else math.inf
        self._end = update + 1

    def audit_again(self, update: int) -> None:
        """Audit the next update as well, unless you have said how often.

        Args:
            update: The number of updates that are done.
        """
        if self._every is None:
            self.restart(update)

    def extend(self, update: int) -> None:
        """Audit the updates before another one as well, of which the first is audited.

        Args:
            update: The number of updates that are done when it begins.
        """
        self._end = update

    def is_due(self, update: int) -> bool:
        """Return whether an update is audited, which is not before `next`.

        Args:
            update: The number of updates that are done.
        """
        if update > self.next:
            following = -(-update // self._every) * self._every if self._every else math.inf
            self.next = update if update < self._end else following
        return update == self.next and not self.has_warned

    def is_followed(self, update: int) -> bool:
        """Return whether the update after another one is audited.

        Args:
            update: The number of updates that are done before that other one.
        """
        return update + 1 < self._end or (bool(self._every) and (update + 1) % (self._every or 1) == 0)

    def choose(
        self, everywhere: Sequence[Sequence[Sequence[Shard]]], rank: int, update: int, *, movable: bool = True
    ) -> Audit:
        """Choose a shard and the places that compute it. Places take turns, so that each is audited soon.

        Args:
            everywhere: The shards of each device of each rank.
            rank: The rank of this process.
            update: The number of updates that are done.
            movable: Whether other ranks can load the samples of a shard, too.
        """
        places = [(each, index) for each, devices in enumerate(everywhere) for index in range(len(devices))]
        working = [place for place in places if everywhere[place[0]][place[1]]]
        count = update // (self._every or 1)
        turn, index = divmod(count, len(working))
        place = working[index]
        reach = () if self.is_mixed else range(len(everywhere)) if movable else (place[0],)
        others = [each for each in places if each != place and each[0] in reach] or [place]
        other = others[turn % len(others)]
        spares = [each for each in others if each != other] or [place]
        shards = everywhere[place[0]][place[1]]
        if self._every is None:
            # What is filled once, such as a cache, holds what the first shard of a place has put there.
            shards = shards[1:] or shards
        shard = shards[crc32(f"{self._seed} {update}".encode()) % len(shards)]
        return Audit(shard, place, other, spares[turn % len(spares)], rank, count)

    def must_repeat(self, finding: Finding, at: tuple[int, int], devices: Any) -> bool:
        """Raise, warn or log if an audit has found a difference; return whether the attempt is made once more.

        Args:
            finding: What was found.
            at: The number of updates that are done, and that of the gradients that this one has computed before.
            devices: The devices of this process.

        Raises:
            FaultError: If a place is wrong.
        """
        update, _ = at
        if self._every is None or not finding.is_repeatable:
            self._warn(f"{finding.text(update, devices)} {finding.cause()}")
            return False
        error = finding.error(update, devices)
        if not finding.wrong:
            raise error
        return self._repeats(error, finding.text(update, devices), at)

    def must_repeat_sum(self, at: tuple[int, int], fault: SumFault) -> bool:
        """Raise or log that a sum over ranks was wrong; return whether the attempt is made once more.

        Args:
            at: As for `must_repeat`.
            fault: What is wrong.

        Raises:
            FaultError: If the update is not repeated.
        """
        (update, _), (rank, clause) = at, fault
        text = f"In update {update} (counted from 0) a sum over the ranks was computed twice, and {clause}."
        error = FaultError(
            f"{text} The memory of a machine or the network between them is faulty. Nothing of the update was applied. "
            "Continue from this state or from a snapshot without that rank; a fault that passes is repeated with "
            "on_fault='repeat'.",
            update=update,
            rank=rank,
        )
        return self._repeats(error, text, at)

    def _repeats(self, error: FaultError, text: str, at: tuple[int, int]) -> bool:
        # A place that is wrong twice in one update is not used any further.
        if self._on_fault == "raise" or self._repeated == at:
            raise error
        self._repeated = at
        LOG.warning("%s The update is repeated.", text)
        return True

    def warn_of_moves(self, names: Sequence[str], changed: Sequence[str] = ()) -> None:
        """Warn of generators that are drawn from, and of tensors of optimizers that change, also if results are equal.

        Args:
            names: The generators that moved while a shard was computed.
            changed: The tensors of optimizers that changed.
        """
        if changed:
            self._warn(CHANGED.format(few(changed)))
        if names:
            draws = DRAWS.format("The loss function or the model draws", " and ".join(names))
            self._warn(draws, RandomStreamWarning)

    def warn_of_left(self, names: Sequence[str]) -> None:
        """Warn if the `forward` of a `BatchLoss` leaves something for its criterion.

        Args:
            names: The tensors that the criterion refers to and that forward has changed.
        """
        if names:
            self._warn(
                f"`forward` of the BatchLoss changes what its criterion refers to: {few(names)}. The criterion is "
                "called once for the whole batch, and finds there what one of the shards has left. Return from forward "
                "what the criterion needs, labels as well: it gets this for all samples."
            )

    def warn_of_outputs(self) -> None:
        """Warn that the outputs that a `BatchLoss` has gathered are not those by which its gradient is computed."""
        self._warn(f"`forward` of the BatchLoss returned other outputs when it was called again for a shard. {CAUSES}")

    def _warn(self, message: str, category: type[Warning] = DeterminismWarning) -> None:
        """Warn once of a dependency, if audits are on."""
        if self.is_on and not self.has_warned:
            self.has_warned = True
            warn(message, category)
