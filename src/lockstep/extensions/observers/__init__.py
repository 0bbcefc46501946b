"""Extensions that observe values of the run: learning rates, gradients, parameters and speed."""

from lockstep.extensions.observers.gradient_norm import GradientNorm as GradientNorm
from lockstep.extensions.observers.observe import ObserveLR as ObserveLR, ObserveValue as ObserveValue
from lockstep.extensions.observers.parameter_statistics import ParameterStatistics as ParameterStatistics
from lockstep.extensions.observers.run_record import RunRecord as RunRecord
from lockstep.extensions.observers.throughput import Throughput as Throughput
from lockstep.extensions.observers.variable_statistics_plot import VariableStatisticsPlot as VariableStatisticsPlot
