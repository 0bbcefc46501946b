"""Compute the cases of portable kernels with one setting or replacement left out, and print which ones differ.

Its first argument is the name of a variable, of a switch or of a replaced operator; "" leaves nothing out. Others are
the names of the cases; without them all are computed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from lockstep.portable import VARIABLES
from lockstep.portable.cases import CASES
from lockstep.portable.golden import differing_names, digests_of, recorded_digests
from lockstep.portable.overrides import OVERRIDES, install

SWITCHES = ("mkldnn", "nnpack")


def digest_of(name: str) -> str:
    """Return the digest of a case, or why it cannot be computed: oneDNN has no LSTM for AVX2."""
    try:
        return digests_of({name: CASES[name]})[name]
    except RuntimeError as error:
        return str(error)


def main(left_out: str, *names: str) -> None:
    """Set everything else, by itself and not by the checks of lockstep, which would refuse to go on."""
    os.environ.update({name: value for name, value in VARIABLES.items() if name != left_out})
    torch.set_num_threads(1)
    backends: Any = torch.backends
    backends.mkldnn.enabled = left_out == "mkldnn"
    backends.nnpack.set_flags(left_out == "nnpack")
    kept = install(left_out)
    try:
        expected = {name: digest for name, digest in recorded_digests().items() if name in (names or CASES)}
        differing = differing_names(expected, {name: digest_of(name) for name in names or CASES})
    finally:
        kept._destroy()
    sys.stdout.write(json.dumps(differing) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
    assert sys.argv[1] in {"", *VARIABLES, *SWITCHES, *OVERRIDES}, sys.argv[1]
