"""What a run measures: anything with ``update``, ``compute`` and ``reset``, means that merge, and reports."""

from lockstep.metrics.accuracy import Accuracy as Accuracy
from lockstep.metrics.average import Average as Average
from lockstep.metrics.mean import Mean as Mean
from lockstep.metrics.mean import merge as merge
from lockstep.metrics.metric import Mergeable as Mergeable
from lockstep.metrics.metric import Metric as Metric
from lockstep.metrics.observed import Observed as Observed
from lockstep.metrics.observed import as_mean as as_mean
from lockstep.metrics.observed import read as read
from lockstep.metrics.observed import read_means as read_means
from lockstep.metrics.reports import Observers as Observers
from lockstep.metrics.reports import collecting as collecting
from lockstep.metrics.reports import report as report
