"""Loss scales as values that name their successor, the finiteness check, master weights, and autocast."""

from lockstep.precision.backward import first_gradient as first_gradient
from lockstep.precision.backward import multiply_ as multiply_
from lockstep.precision.finite import divide_ as divide_
from lockstep.precision.finite import first_flagged as first_flagged
from lockstep.precision.finite import first_nonfinite as first_nonfinite
from lockstep.precision.finite import nonfinite_flag as nonfinite_flag
from lockstep.precision.finite import nonfinite_flags as nonfinite_flags
from lockstep.precision.finite import sent as sent
from lockstep.precision.finite import settled as settled
from lockstep.precision.finite import unscale_ as unscale_
from lockstep.precision.leaving_out import ChangesOnlyGradients as ChangesOnlyGradients
from lockstep.precision.leaving_out import left_out_if as left_out_if
from lockstep.precision.leaving_out import why_it_waits as why_it_waits
from lockstep.precision.masters import HALF_PRECISION as HALF_PRECISION
from lockstep.precision.masters import MasterWeights as MasterWeights
from lockstep.precision.moving import MovingScale as MovingScale
from lockstep.precision.policy import Precision as Precision
from lockstep.precision.policy import parse_precision as parse_precision
from lockstep.precision.scaler import HasMasters as HasMasters
from lockstep.precision.scaler import LossScaler as LossScaler
from lockstep.precision.scales import DynamicLossScale as DynamicLossScale
from lockstep.precision.scales import LossScale as LossScale
from lockstep.precision.scales import RampLossScale as RampLossScale
from lockstep.precision.scales import StaticLossScale as StaticLossScale
from lockstep.precision.scales import nnabla_loss_scale as nnabla_loss_scale
from lockstep.precision.scales import parse_loss_scale as parse_loss_scale
