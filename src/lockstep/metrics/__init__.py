"""What a run measures: anything with ``update``, ``compute`` and ``reset``, and means that merge."""

from lockstep.metrics.mean import Mean as Mean
from lockstep.metrics.mean import merge as merge
