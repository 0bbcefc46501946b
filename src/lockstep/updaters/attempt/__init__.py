"""One attempt at an update: its request, its state, the settings of its thread, and the deferred overflow check."""

from lockstep.updaters.attempt.attempt import (
    FINITE as FINITE,
    Attempt as Attempt,
    Described as Described,
    GradientRequest as GradientRequest,
    check_finite as check_finite,
)
from lockstep.updaters.attempt.audit import (
    Audit as Audit,
    Auditor as Auditor,
    Exchange as Exchange,
    OnFault as OnFault,
    Seals as Seals,
    names_of_seals as names_of_seals,
    seals_of as seals_of,
)
from lockstep.updaters.attempt.context import UpdateContext as UpdateContext, UpdateSigint as UpdateSigint
from lockstep.updaters.attempt.deferred import Deferral as Deferral, DeferredCheck as DeferredCheck
from lockstep.updaters.attempt.other_place import run_as_elsewhere as run_as_elsewhere
from lockstep.updaters.attempt.step_stream import StepStream as StepStream
