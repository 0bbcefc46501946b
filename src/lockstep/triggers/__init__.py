"""Triggers decide when an extension runs and when a run ends; they are called after every update."""

from lockstep.triggers.best_value import BestValue as BestValue, MaxValue as MaxValue, MinValue as MinValue
from lockstep.triggers.early_stopping import EarlyStopping as EarlyStopping
from lockstep.triggers.times import (
    Interval as Interval,
    ManualSchedule as ManualSchedule,
    Once as Once,
    Time as Time,
    TriggerSpec as TriggerSpec,
    get_trigger as get_trigger,
)
from lockstep.triggers.trigger import (
    AllOf as AllOf,
    AnyOf as AnyOf,
    Never as Never,
    Progress as Progress,
    Trigger as Trigger,
    Unit as Unit,
    position as position,
    reached as reached,
)
from lockstep.triggers.until import Latch as Latch, Until as Until, get_until as get_until
