"""Extensions that observe values of the run: learning rates, gradients, parameters and speed."""

from lockstep.extensions.observers.observe import (
    GradientNorm as GradientNorm,
    ObserveLR as ObserveLR,
    ObserveValue as ObserveValue,
    ParameterStatistics as ParameterStatistics,
    Throughput as Throughput,
)
from lockstep.extensions.observers.run_record import RunRecord as RunRecord
from lockstep.extensions.plots import VariableStatisticsPlot as VariableStatisticsPlot
