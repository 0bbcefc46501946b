"""The version of the library. The result of a run depends on it."""

__version__ = "0.1.0"
