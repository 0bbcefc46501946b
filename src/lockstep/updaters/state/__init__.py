"""The state that an update changes: how it is saved, loaded and restored."""

from lockstep.updaters.state import lazy as lazy
from lockstep.updaters.state.carried import (
    Carried as Carried,
    CarriedAttempt as CarriedAttempt,
    CarriedValues as CarriedValues,
)
from lockstep.updaters.state.checkpoint import (
    live_state_of as live_state_of,
    load_state as load_state,
    state_of as state_of,
)
from lockstep.updaters.state.recipe_fields import (
    CODE as CODE,
    UNKNOWN_SHAPE as UNKNOWN_SHAPE,
    RecipeFields as RecipeFields,
    name_of as name_of,
    recipe_fields as recipe_fields,
)
from lockstep.updaters.state.savepoint import Savepoint as Savepoint, copy_state as copy_state
from lockstep.updaters.state.sharding import (
    ShardedState as ShardedState,
    moving as moving,
    refuse_named_state as refuse_named_state,
)
from lockstep.updaters.state.training import TrainingState as TrainingState
