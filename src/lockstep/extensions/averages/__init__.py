"""Extensions that average over updates: values, and the weights of a model."""

from lockstep.extensions.averages.exponential_moving_average import (
    ExponentialMovingAverage as ExponentialMovingAverage,
)
from lockstep.extensions.averages.micro_average import MicroAverage as MicroAverage
