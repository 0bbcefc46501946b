"""Start the processes of a run: a script by `lockstep run`, or a function by `launch`."""

from lockstep.launch.agent import Run as Run, run as run
from lockstep.launch.processes import launch as launch
