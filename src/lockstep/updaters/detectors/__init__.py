"""Notice in the first updates what makes a result depend on where shards are computed."""

from lockstep.updaters.detectors.first_updates import FirstUpdates as FirstUpdates
from lockstep.updaters.detectors.outside_state import LOSSES as LOSSES, OutsideState as OutsideState
from lockstep.updaters.detectors.references import (
    attributes as attributes,
    compares_objects as compares_objects,
    defining_modules as defining_modules,
    names_in as names_in,
    references as references,
)
from lockstep.updaters.detectors.repeated_step import warn_of_steps as warn_of_steps
