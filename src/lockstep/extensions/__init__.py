"""The extensions that come with lockstep: evaluation, logs, tables, plots, schedules, snapshots and more."""

import sys as _sys
import typing as _typing

from lockstep import metrics as _metrics, triggers as _triggers
from lockstep.elsewhere import missing_name as _missing_name
from lockstep.extensions.averages import (
    ExponentialMovingAverage as ExponentialMovingAverage,
    MicroAverage as MicroAverage,
)
from lockstep.extensions.evaluator import Evaluator as Evaluator
from lockstep.extensions.fail_on_non_finite import FailOnNonFinite as FailOnNonFinite
from lockstep.extensions.log_report import LogReport as LogReport
from lockstep.extensions.loggers.csv_logger import CSVLogger as CSVLogger
from lockstep.extensions.loggers.logger import Logger as Logger
from lockstep.extensions.loggers.mlflow_logger import MLflowLogger as MLflowLogger
from lockstep.extensions.loggers.tensorboard_logger import TensorBoardLogger as TensorBoardLogger
from lockstep.extensions.loggers.wandb_logger import WandbLogger as WandbLogger
from lockstep.extensions.observers.observe import (
    GradientNorm as GradientNorm,
    ObserveLR as ObserveLR,
    ObserveValue as ObserveValue,
    ParameterStatistics as ParameterStatistics,
    Throughput as Throughput,
)
from lockstep.extensions.observers.run_record import RunRecord as RunRecord
from lockstep.extensions.plots import PlotReport as PlotReport, VariableStatisticsPlot as VariableStatisticsPlot
from lockstep.extensions.screen import PrintReport as PrintReport, ProgressBar as ProgressBar
from lockstep.extensions.snapshot import Snapshot as Snapshot
from lockstep.extensions.step_scheduler import StepScheduler as StepScheduler
from lockstep.trainer import make_extension as make_extension

if not _typing.TYPE_CHECKING:  # checkers of types know which names there are

    def __getattr__(name: str) -> object:
        """Raise an error that says where the name is, or what it is called here."""
        raise _missing_name(_sys.modules[__name__], name, [_triggers, _metrics])
