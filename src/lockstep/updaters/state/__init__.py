"""The state that an update changes: how it is saved, loaded and restored."""

from lockstep.updaters.state import lazy as lazy
from lockstep.updaters.state.checkpoint import load_state as load_state, state_of as state_of
from lockstep.updaters.state.savepoint import Savepoint as Savepoint
from lockstep.updaters.state.training import Training as Training
