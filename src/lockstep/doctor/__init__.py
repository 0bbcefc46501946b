"""Examine a machine: what it offers, what would break the determinism guarantee on it, and whether it computes so."""

from lockstep.doctor.findings import Finding as Finding, find_problems as find_problems, is_sound as is_sound
from lockstep.doctor.machine import Facts as Facts, describe_machine as describe_machine
from lockstep.doctor.self_test import Outcome as Outcome, are_equal as are_equal, run_self_test as run_self_test
