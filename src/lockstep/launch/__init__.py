"""Start the processes of a run."""

from lockstep.launch.processes import launch as launch
