"""Start the processes of a run."""

from lockstep.launch.agent import Run as Run, run as run
from lockstep.launch.processes import launch as launch
