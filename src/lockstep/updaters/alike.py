"""Keep the ranks of a run alike: compared when it begins, and again and again while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Literal

from lockstep.communicators import Communicator
from lockstep.communicators.agreement import StateWatch, check_fields, compare
from lockstep.communicators.kernel_class import kernel_class, self_test
from lockstep.digest import fingerprint
from lockstep.errors import DisagreementError
from lockstep.replicas.settings import SINGLE_THREAD, ComputeMode
from lockstep.updaters.description import Fields
from lockstep.updaters.training import Training

LOG = logging.getLogger("lockstep")

Differing = Literal["broadcast", "refuse"]
"""What is done about models that differ when a run begins."""

SAME_KERNELS: Final = "Other kernels round differently: run all processes on one kind of machine and installation."
SAME_CODE: Final = "Run the same script with the same arguments on every rank."
SAME_SEED: Final = "Build the model from the same seed on every rank, or let rank 0's be broadcast."


class Alikeness:
    """Compares what must be alike on all ranks.

    Args:
        communicator: Joins them.
        training: What is trained.
        recipe: Describes the run.
        every: Within how many updates all tensors of the state are compared.
        differing: What is done about models that differ when a fresh run begins.
    """

    def __init__(
        self,
        communicator: Communicator,
        training: Training,
        recipe: Callable[[], Fields],
        *,
        every: int,
        differing: Differing,
    ) -> None:
        self._communicator = communicator
        self._training = training
        self._recipe = recipe
        self._differing: Differing = differing
        self._watch = StateWatch(training.tensors, every)
        self._begun = False

    def begin(self) -> None:
        """Compare everything, before the first update and again when a state was loaded.

        Raises:
            DisagreementError: On every rank; it names what differs, and on which rank.
        """
        if self._begun:
            return
        check_fields(self._communicator, self._kernels(), what="kernel class", remedy=SAME_KERNELS)
        check_fields(self._communicator, self._recipe(), what="recipe", remedy=SAME_CODE)
        self._compare_state()
        self._begun = True

    def state_loaded(self) -> None:
        """Compare everything before the next update: the state is another now."""
        self._begun = False
        self._watch.forget()

    def digest(self) -> str:
        """Give the digest of the part of the state whose turn it is."""
        return self._watch.part_of(self._training.iteration)

    def check(self, digests: Sequence[str]) -> None:
        """Refuse to go on where the digests of the ranks differ.

        Raises:
            DisagreementError: On every rank; it names the rank, the tensor and the update.
        """
        if len(set(digests)) > 1:
            raise self._watch.explain(self._communicator, self._training.iteration)

    def _kernels(self) -> Fields:
        """Describe the kernels of this rank, and what they make of a few numbers."""
        devices = list(dict.fromkeys(self._training.group.devices))
        fields = kernel_class(devices)
        with ComputeMode(SINGLE_THREAD):
            tests = [self_test(device) for device in devices]
        for name in tests[0]:
            fields[name] = " ".join(sorted({test[name] for test in tests}))
        return fields

    def _compare_state(self) -> None:
        """Compare all tensors; in a fresh run take rank 0's models where they differ, if that is wanted."""
        difference = self._difference()
        if difference is None:
            return
        if self._training.iteration or self._differing == "refuse":
            raise difference
        LOG.info("The models of the ranks differ (%s): all take rank 0's.", difference.subject)
        self._take_rank_0()
        difference = self._difference()
        if difference is not None:
            raise difference

    def _take_rank_0(self) -> None:
        model = self._training.group.model
        named = self._training.tensors()
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._communicator.broadcast([tensor for tensor in named.values() if id(tensor) in own])
        for masters in self._training.masters.values():
            masters.refresh()

    def _difference(self) -> DisagreementError | None:
        """Find the first tensor in which a rank differs from rank 0."""
        found = compare(
            self._communicator,
            {name: fingerprint([tensor]).hex() for name, tensor in self._training.tensors().items()},
        )
        what = "parameters, buffers and optimizer state"
        return None if found is None else found.error(what=what, remedy=SAME_SEED)
