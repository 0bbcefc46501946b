"""When to act: small objects that are asked after every update and answer yes or no."""

from lockstep.triggers.best_value import BestValue as BestValue
from lockstep.triggers.best_value import MaxValue as MaxValue
from lockstep.triggers.best_value import MinValue as MinValue
from lockstep.triggers.early_stopping import EarlyStopping as EarlyStopping
from lockstep.triggers.interval import Interval as Interval
from lockstep.triggers.manual_schedule import ManualSchedule as ManualSchedule
from lockstep.triggers.once import Once as Once
from lockstep.triggers.spec import TriggerSpec as TriggerSpec
from lockstep.triggers.spec import get_trigger as get_trigger
from lockstep.triggers.time import Time as Time
from lockstep.triggers.trigger import Never as Never
from lockstep.triggers.trigger import Progress as Progress
from lockstep.triggers.trigger import Trigger as Trigger
from lockstep.triggers.until import Latch as Latch
from lockstep.triggers.until import Until as Until
from lockstep.triggers.until import get_until as get_until
