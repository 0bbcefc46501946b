"""Refuse whole numbers that are none, or too small ones.

``True`` is an ``int`` for Python; as a count it is a mistake, an option that went to the wrong place.
"""

from __future__ import annotations


def check_integer(name: str, value: object, *, minimum: int | None = None) -> None:
    """Refuse what is no whole number, or too small a one.

    >>> check_integer("num_shards", 8, minimum=1)
    >>> check_integer("num_shards", True, minimum=1)
    Traceback (most recent call last):
    TypeError: `num_shards` must be an integer, got True.

    Args:
        name: What the argument is called.
        value: What was given.
        minimum: The least it may be; None for any.

    Raises:
        TypeError: It is no ``int``, or is a ``bool``.
        ValueError: It is below the minimum.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer, got {value!r}.")
    if minimum is not None and value < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {value}.")
