"""Triggers decide when an extension runs and when a run ends; they are called after every update."""

from lockstep.triggers.observed_values import (
    BestValue as BestValue,
    EarlyStopping as EarlyStopping,
    MaxValue as MaxValue,
    MinValue as MinValue,
)
from lockstep.triggers.times import (
    Interval as Interval,
    Latch as Latch,
    ManualSchedule as ManualSchedule,
    Once as Once,
    Time as Time,
    TriggerSpec as TriggerSpec,
    Until as Until,
    get_trigger as get_trigger,
    get_until as get_until,
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
