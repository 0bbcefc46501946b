"""The extensions that come with lockstep: evaluation, logs, tables, plots and a progress bar."""

from lockstep.extensions.evaluator import Evaluator as Evaluator
from lockstep.extensions.log_report import LogReport as LogReport
from lockstep.extensions.plot_report import PlotReport as PlotReport
from lockstep.extensions.print_report import PrintReport as PrintReport
from lockstep.extensions.progress_bar import ProgressBar as ProgressBar
