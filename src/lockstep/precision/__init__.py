"""Mixed precision: loss scales, the check for non-finite gradients, master weights, and autocast."""

from lockstep.precision.finite import (
    copy_to_device as copy_to_device,
    divide_ as divide_,
    first_flagged as first_flagged,
    first_nonfinite as first_nonfinite,
    nonfinite_flag as nonfinite_flag,
    nonfinite_flags as nonfinite_flags,
    resolve_conj_neg as resolve_conj_neg,
    to_device as to_device,
    unscale_ as unscale_,
    unscale_and_check_ as unscale_and_check_,
)
from lockstep.precision.policy import (
    HALF_PRECISION as HALF_PRECISION,
    MasterWeights as MasterWeights,
    Precision as Precision,
    asks_for_closure as asks_for_closure,
    parameters_of as parameters_of,
    parse_precision as parse_precision,
    required_by_step as required_by_step,
)
from lockstep.precision.scaler import (
    ChangesOnlyGradients as ChangesOnlyGradients,
    LossScaler as LossScaler,
    cannot_skip as cannot_skip,
    skipped_if as skipped_if,
    step_hooks as step_hooks,
    warn_of_half as warn_of_half,
)
from lockstep.precision.scales import (
    CurrentScale as CurrentScale,
    DynamicLossScale as DynamicLossScale,
    LossScale as LossScale,
    RampLossScale as RampLossScale,
    StaticLossScale as StaticLossScale,
    initial_gradient as initial_gradient,
    multiply_ as multiply_,
    nnabla_loss_scale as nnabla_loss_scale,
    parse_loss_scale as parse_loss_scale,
)
