"""`lockstep run`: a script on several processes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lockstep.launch import Run, run

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - argparse names it no other way

DESCRIPTION = """
Start a script on several processes of this machine, or of several machines: say the same command on each.
torchrun's own agent does it, with what makes its restarts work with gloo, a timeout of a minute where torch's
is half an hour, and one thread per process. An updater in the script finds the others without another line.
"""
EXAMPLES = """
  lockstep run -n 2 train.py --epochs 3
  lockstep run -n 4 --nnodes 2 --rdzv node0:29400 train.py      on two machines
"""


def add_parser(commands: Subparsers) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "run",
        help="start a script on several processes",
        description=DESCRIPTION,
        epilog=f"examples:{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-n", "--num-processes", default="auto", help="on this machine; auto: one a GPU, else one a core"
    )
    parser.add_argument("--nnodes", default="1", help="machines; 2:4 for from two to four (default: 1)")
    parser.add_argument("--rdzv", default="", metavar="HOST:PORT", help="where several machines meet")
    parser.add_argument("--local-addr", default="", help="where other machines reach this one")
    parser.add_argument("--rdzv-id", default="lockstep", help="a name that the machines of one run share")
    parser.add_argument("--max-restarts", type=int, default=0, help="of all processes after a failure (default: 0)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a rank waits for another (default: 60)")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.set_defaults(call=lambda options: _call(parser, options))


def _call(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        settings = Run(
            options.script,
            options.arguments,
            num_processes=options.num_processes,
            nodes=options.nnodes,
            rendezvous=options.rdzv,
            address=options.local_addr,
            run_id=options.rdzv_id,
            max_restarts=options.max_restarts,
            timeout=options.timeout,
            as_module=options.module,
        )
    except ValueError as error:
        parser.error(str(error))
    return run(settings)
