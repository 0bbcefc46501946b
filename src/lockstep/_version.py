"""The version of the library, which is part of what makes a run's result."""

__version__ = "0.1.0"
