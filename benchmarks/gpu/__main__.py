"""Check lockstep on an accelerator: bits, streams and cores, one call each of at most ten minutes.

    python3 dev.py gpu bits          digests of placements, fused optimizers, batches that arrive late
    python3 dev.py gpu streams       waits of the host, processes, memory
    python3 dev.py gpu timings       against torch's autocast, GradScaler and fused optimizers
    python3 dev.py gpu cores         1, 2, 4 ... pinned CPU cores; needs no accelerator

Each check prints what is expected and what was found, and a failure does not end the call. Every call writes its
results to `runs/gpu/CALL.jsonl`, one line per check as soon as it has ended, and the results of all calls to
`runs/gpu/table.md`. The exit status is 1 if a check has failed. `--device cpu --small` tries the programs without an
accelerator.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

CALLS = ("bits", "streams", "timings", "cores")


def main() -> None:
    """Parse the options and make one call."""
    parser = argparse.ArgumentParser(
        prog="dev.py gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--device", help="a device such as cuda:1 or cpu; by default the first accelerator")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="the folder for the results")
    parser.add_argument("--only", action="append", default=[], help="only checks whose name contains this; repeat")
    parser.add_argument("--default-kernels", action="store_true", help="do not ask for deterministic kernels")
    parser.add_argument("--small", action="store_true", help="small models and few repetitions, to try the programs")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="for the call cores")
    options = parser.parse_args()
    if not options.default_kernels:
        # cuBLAS reads this when it is initialized, so before torch does anything.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        import torch  # noqa: PLC0415 - after the variable is set
    except ImportError:
        sys.exit(f"torch must be installed for {sys.executable}; the checks use the torch of the machine.")
    if options.call != "cores" and options.device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            sys.exit(
                f"`{options.call}` needs an accelerator, but torch {torch.__version__} finds none on this machine. "
                "Run it on a machine with one, or try the program with `--device cpu --small`."
            )
        options.device = f"{found.type}:0"
    from report import Report  # noqa: PLC0415 - it imports torch

    torch.use_deterministic_algorithms(options.call != "cores" and not options.default_kernels)
    report = Report(options.call, options.out, options.device or "cpu", options.only)
    importlib.import_module(options.call).run(report, options)
    sys.exit(report.end())


if __name__ == "__main__":
    main()
