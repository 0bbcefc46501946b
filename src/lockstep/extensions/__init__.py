"""The extensions that come with lockstep: evaluation, logs, tables, plots, schedules, snapshots and more."""

from lockstep.extensions.averages import (
    ExponentialMovingAverage as ExponentialMovingAverage,
    MicroAverage as MicroAverage,
)
from lockstep.extensions.evaluator import Evaluator as Evaluator
from lockstep.extensions.fail_on_non_finite import FailOnNonFinite as FailOnNonFinite
from lockstep.extensions.log_report import LogReport as LogReport
from lockstep.extensions.loggers import (
    CSVLogger as CSVLogger,
    Logger as Logger,
    MLflowLogger as MLflowLogger,
    TensorBoardLogger as TensorBoardLogger,
    WandbLogger as WandbLogger,
)
from lockstep.extensions.observers import (
    GradientNorm as GradientNorm,
    ObserveLR as ObserveLR,
    ObserveValue as ObserveValue,
    ParameterStatistics as ParameterStatistics,
    RunRecord as RunRecord,
    Throughput as Throughput,
    VariableStatisticsPlot as VariableStatisticsPlot,
)
from lockstep.extensions.plot_report import PlotReport as PlotReport
from lockstep.extensions.print_report import PrintReport as PrintReport
from lockstep.extensions.progress_bar import ProgressBar as ProgressBar
from lockstep.extensions.snapshot import Snapshot as Snapshot
from lockstep.extensions.step_scheduler import StepScheduler as StepScheduler
from lockstep.trainer import make_extension as make_extension
