"""Start a script on several processes.

Start a script on several processes of this machine, or of several machines: run the same command on each.
It uses torchrun's own agent, with restarts that work with gloo, a timeout of one minute instead of 30, and
one thread per process. An updater in the script finds the other processes without further code.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import fields

from lockstep.launch import Run, run
from lockstep.portable import ask_for_portable_kernels

EXAMPLES = """
  lockstep run -n 2 train.py --epochs 3
  lockstep run -n 2 --portable train.py                         the same bits on other processors
  lockstep run -n 4 --nnodes 2 --rdzv node0:29400 train.py      on two machines
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    # This formatter keeps the line breaks of the examples.
    parser.epilog, parser.formatter_class = f"examples:{EXAMPLES}", argparse.RawDescriptionHelpFormatter
    names = ("-n", "--num-processes", "--nproc-per-node", "--nproc_per_node")  # the last two are torchrun's
    parser.add_argument(*names, default="auto", help="processes on this machine; auto: one per GPU, else one per core")
    parser.add_argument("--nnodes", default="1", help="number of machines; 2:4 for two to four (default: 1)")
    parser.add_argument("--rdzv", default="", metavar="HOST:PORT", help="address at which several machines meet")
    parser.add_argument("--local-addr", default="", help="address by which other machines reach this one")
    parser.add_argument("--rdzv-id", default="lockstep", help="name that is the same on all machines of one run")
    parser.add_argument("--max-restarts", type=int, default=0, help="how often to restart after a failure (default: 0)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a rank waits for another (default: 60)")
    parser.add_argument(
        "--shutdown-timeout",
        type=int,
        metavar="SECONDS",
        help="seconds the processes have after a signal to write their state (default: 30)",
    )
    parser.add_argument(
        "--portable",
        action="store_true",
        help="compute with kernels that give the same bits on every x86-64 processor with AVX2 and FMA",
    )
    parser.add_argument("-m", "--module", action="store_true", help="treat the script as the name of a module")
    parser.add_argument("script", help="path of the script, or name of the module")
    # All that follows the script belongs to it: its options must not be taken for options of this command.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script").required = False


def call(options: argparse.Namespace) -> int:
    """Start the run that the options describe, and return the exit code."""
    parser: argparse.ArgumentParser = options.parser
    try:
        settings = Run(**{each.name: getattr(options, each.name) for each in fields(Run)})
        if options.portable:
            ask_for_portable_kernels(os.environ)
    except ValueError as error:
        # argparse prints the message with the usage and without a traceback.
        parser.error(str(error))
    return run(settings)
