"""What a run measures: anything with ``update``, ``compute`` and ``reset``, means that merge, and reports."""

from lockstep.metrics.accuracy import Accuracy as Accuracy
from lockstep.metrics.average import Average as Average
from lockstep.metrics.mean import Mean as Mean, merge as merge
from lockstep.metrics.metric import Mergeable as Mergeable, Metric as Metric
from lockstep.metrics.observed import Observed as Observed, as_mean as as_mean, read as read, read_means as read_means
from lockstep.metrics.reports import Observers as Observers, collecting as collecting, report as report
