"""Fixtures of the tests of replicas."""

from __future__ import annotations

from tests.support.hanging import wait_patiently

__all__ = ["wait_patiently"]
