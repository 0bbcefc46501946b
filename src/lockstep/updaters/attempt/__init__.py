"""One attempt at an update: its request, its state, the settings of its thread, and the deferred overflow check."""

from lockstep.updaters.attempt.attempt import (
    Attempt as Attempt,
    GradientRequest as GradientRequest,
    check_finite as check_finite,
)
from lockstep.updaters.attempt.context import StepContext as StepContext, UpdateSigint as UpdateSigint
from lockstep.updaters.attempt.deferred import Deferral as Deferral
