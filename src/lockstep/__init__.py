"""Synchronous data-parallel training for PyTorch whose result does not depend on where it ran."""

__version__ = "0.1.0"
