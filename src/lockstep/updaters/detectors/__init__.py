"""Find what functions refer to outside of the model: tensors and random generators, which may move."""

from lockstep.updaters.detectors.draws import StepDraws as StepDraws, moved as moved
from lockstep.updaters.detectors.outside import LOSSES as LOSSES, outside_tensors as outside_tensors, states as states
from lockstep.updaters.detectors.references import (
    attributes as attributes,
    compares_objects as compares_objects,
    defining_modules as defining_modules,
    names_in as names_in,
    references as references,
)
from lockstep.updaters.detectors.repeated_step import warn_of_steps as warn_of_steps
