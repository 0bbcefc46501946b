"""What a training run does besides updating: evaluate, log, print, plot, show a bar."""

from lockstep.extensions.evaluator import Evaluator as Evaluator
from lockstep.extensions.log_report import LogReport as LogReport
from lockstep.extensions.plot_report import PlotReport as PlotReport
from lockstep.extensions.print_report import PrintReport as PrintReport
from lockstep.extensions.progress_bar import ProgressBar as ProgressBar
