"""Processes that load samples in advance: what they are given, and what happens when they are lost."""

from lockstep.data.workers.dataset_state import DatasetState as DatasetState
from lockstep.data.workers.prefetch import LoadRequest as LoadRequest, load_ahead as load_ahead
from lockstep.data.workers.watch import watched as watched
