"""Check that the ranks of a run agree: completely when the run begins, and part by part while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch._subclasses import FakeTensor

from lockstep.communicators import Communicator, StateComparer, check_fields, compare, kernel_class, self_test
from lockstep.digest import fingerprint
from lockstep.errors import DisagreementError
from lockstep.replicas import SINGLE_THREAD, ComputeMode, held_tensors
from lockstep.updaters.detectors import outside_tensors
from lockstep.updaters.ranks.same_code import check_code, describe_code
from lockstep.updaters.setup.recipe import Recipe
from lockstep.updaters.state.recipe_fields import recipe_fields, settings_of
from lockstep.updaters.state.training import TrainingState

LOG = logging.getLogger("lockstep")

KERNELS_REMEDY: Final = "Kernels that differ round differently. Run all ranks on one type of machine and installation."
CODE_REMEDY: Final = "Run the same script with the same arguments and seeds on every rank."
MODELS_REMEDY: Final = "Build the model from the same seed on every rank, or leave out `differing_models='refuse'`."
OUTSIDE_REMEDY: Final = (
    "Create it from the same seed on every rank, by torch.manual_seed before; or make it a buffer or a module of the "
    "model, or pass its module as one of several models, which begin with the values of rank 0."
)


class RankConsistency:
    """Compares everything that must be equal on all ranks.

    Args:
        communicator: The communicator of the run.
        training: The training state.
        recipe: The arguments of the updater.
    """

    def __init__(self, communicator: Communicator, training: TrainingState, recipe: Recipe) -> None:
        self._communicator = communicator
        self._training = training
        self._recipe = recipe
        self._comparer = StateComparer(training.tensors, communicator.check_every)
        self._is_checked = False

    def check_start(self) -> None:
        """Compare everything, before the first update and again after a state was loaded.

        Raises:
            DisagreementError: On every rank, if ranks differ; it names the difference and the rank.
        """
        if self._is_checked:
            return
        check_fields(self._communicator, self._kernels(), what="kernel class", remedy=KERNELS_REMEDY)
        check_fields(self._communicator, describe_run(self._training, self._recipe), what="recipe", remedy=CODE_REMEDY)
        check_code(self._communicator, describe_code(self._training, self._recipe))
        self._compare_state()
        outside = _fingerprints(self._outside())
        check_fields(
            self._communicator, outside, what="tensors beside its parameters and buffers", remedy=OUTSIDE_REMEDY
        )
        # Set only after all comparisons have passed, so that an update after an error compares again.
        self._is_checked = True

    def state_loaded(self) -> None:
        """Request a full comparison before the next update, because the state was replaced."""
        self._is_checked = False
        self._comparer.forget()

    def state_digest(self) -> str:
        """Return the digest of the part of the state that is due in this update."""
        return self._comparer.digest_at(self._training.iteration)

    def check_digests(self, digests: Sequence[str]) -> None:
        """Check that the digests of all ranks are equal.

        Args:
            digests: The digest of each rank.

        Raises:
            DisagreementError: On every rank, if they differ; it names the rank, the tensor and the update.
        """
        # Every rank has the same digests, so all of them enter the collective search for the difference, or none does.
        if len(set(digests)) > 1:
            raise self._comparer.explain(self._communicator, self._training.iteration)

    def _kernels(self) -> Fields:
        """Describe the kernels of this rank, with the results they give for a few numbers."""
        devices = list(dict.fromkeys(self._training.replicas.devices))
        fields = kernel_class(devices)
        # In the settings of an update: other numbers of intra-op threads would give other bits than the shards have.
        with ComputeMode(SINGLE_THREAD):
            tests = [self_test(device) for device in devices]
        for name in tests[0]:
            fields[name] = " ".join(sorted({test[name] for test in tests}))
        return fields

    def _compare_state(self) -> None:
        """Compare all tensors of the state; a fresh run may take the models of rank 0 where they differ."""
        difference = self._difference()
        if difference is None:
            return
        # Models differ by their seeds only before the first update. Later, a difference means that the ranks computed
        # different things, and copying one of them would hide that.
        if self._training.iteration or self._communicator.differing_models == "refuse":
            raise difference
        LOG.info("The models of the ranks differ (%s). All ranks now use the models of rank 0.", difference.subject)
        self._broadcast_models()
        # Only models were sent. Optimizer state that still differs is refused.
        difference = self._difference()
        if difference is not None:
            raise difference

    def _broadcast_models(self) -> None:
        """Copy the models of rank 0 to all ranks."""
        model = self._training.replicas.model
        named = self._training.tensors()
        # Sent in the order of names, which is the same on all ranks; the order of registration need not be.
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._communicator.broadcast([tensor for tensor in named.values() if id(tensor) in own])
        # Master weights are copies of the weights that have just been replaced.
        for masters in self._training.masters.values():
            masters.refresh()

    def _difference(self) -> DisagreementError | None:
        """Find the first tensor in which a rank differs from rank 0."""
        found = compare(self._communicator, _fingerprints(self._training.tensors()))
        what = "parameters, buffers and optimizer state"
        return None if found is None else found.error(what=what, remedy=MODELS_REMEDY)

    def _outside(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name that the model and the loss function hold beside what is trained."""
        model = self._training.replicas.model
        named = outside_tensors(model, ()) | outside_tensors(self._recipe.loss_fn, [model])
        known = {id(each) for each in (*named.values(), *self._training.tensors().values())}
        for index, tensor in enumerate(held_tensors(model)):
            if id(tensor) not in known:
                named[f"tensor {index} of shape {tuple(tensor.shape)}"] = tensor
        own = {id(each) for each in (*model.parameters(), *model.buffers())}
        # Nodes of an exported graph hold tensors without values.
        has_values = [name for name, each in named.items() if not each.is_meta and not isinstance(each, FakeTensor)]
        return {name: named[name] for name in has_values if id(named[name]) not in own}


def _fingerprints(tensors: Mapping[str, torch.Tensor]) -> Fields:
    return {name: fingerprint([tensor]).hex() for name, tensor in tensors.items()}


Fields = dict[str, str]
"""Descriptions by name."""


def describe_run(training: TrainingState, recipe: Recipe) -> Fields:
    """Describe the current state of a run, for comparison between ranks: its recipe, and how far it has come.

    Args:
        training: The training state.
        recipe: The arguments of the updater.
    """
    described = recipe_fields(recipe, settings_of(training), training.models, num_shards=recipe.num_shards or 0)
    described |= {"max_skipped": recipe.max_skipped, "loss_scale state": training.loss_scale.state_dict()}
    described |= {f"epoch of iterator {name!r}": each.epoch_detail for name, each in training.iterators.items()}
    for name, model in training.models.items():
        evaluating = [path for path, module in model.named_modules() if not module.training]
        described[f"modules of {name!r} in evaluation mode"] = evaluating
    texts = {f"`{name}`": repr(value) for name, value in described.items()}
    return {"number of updates": str(training.iteration), **texts}
