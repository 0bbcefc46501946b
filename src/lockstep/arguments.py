"""Check arguments that must be numbers, True or False, one of some names, of a class, or functions of some arguments.

In Python ``True`` is an ``int``. Where a count is expected it is most likely an option passed to the wrong argument, so
it is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from types import UnionType
from typing import Any, Literal, TypeAlias, TypeVar

T = TypeVar("T")

Mode: TypeAlias = Literal["auto", "min", "max"]


def check_integer(name: str, value: object, *, minimum: int | None = None) -> None:
    """Check that an argument is a whole number, and not smaller than a minimum.

    >>> check_integer("num_shards", 8, minimum=1)
    >>> check_integer("num_shards", True, minimum=1)
    Traceback (most recent call last):
    TypeError: `num_shards` must be an integer, got True.

    Args:
        name: The name of the argument in error messages.
        value: The value to check.
        minimum: The smallest value that is allowed, or None for no limit.

    Raises:
        TypeError: If the value is not an ``int``, or is a ``bool``.
        ValueError: If the value is less than `minimum`.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        is_text = isinstance(value, str) and value.isdecimal()
        is_whole = is_text or (hasattr(value, "__index__") and not isinstance(value, bool))
        shape = tuple(getattr(value, "shape", ()))
        found = f"a {type(value).__name__} of shape {shape}" if shape else repr(value)
        remedy = f" Pass int({repr(value) if is_text else value})." if is_whole and not shape else ""
        raise TypeError(f"`{name}` must be an integer, got {found}.{remedy}")
    if minimum is not None and value < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {value}.")


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    finite: bool = False,
) -> None:
    """Check that an argument is a number, and within bounds, which NaN never is.

    >>> check_number("rate", 0.1, least=0, finite=True)
    >>> check_number("rate", float("inf"), least=0, finite=True)
    Traceback (most recent call last):
    ValueError: `rate` must be finite and at least 0, got inf.
    >>> check_number("rate", "0.1")
    Traceback (most recent call last):
    TypeError: `rate` must be a number, got '0.1'. Pass float('0.1').

    Args:
        name: The name of the argument in error messages.
        value: The number, or a tensor of one.
        least: The smallest value that is allowed; None for no such bound.
        above: What the value must be above; None for no such bound.
        below: What the value must be less than; None for no such bound.
        finite: Whether it must be finite.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is not within the bounds.
    """
    if value is True or value is False or not hasattr(value, "__float__"):
        is_text = isinstance(value, str) and any(map(str.isdecimal, value))
        raise TypeError(f"`{name}` must be a number, got {value!r}.{f' Pass float({value!r}).' if is_text else ''}")
    is_within = (least is None or value >= least) and (above is None or value > above)
    if not is_within or not (below is None or value < below) or (finite and not -math.inf < value < math.inf):
        bounds = {"at least": least, "above": above, "less than": below}
        rules = ["finite"] * finite + [f"{rule} {bound}" for rule, bound in bounds.items() if bound is not None]
        raise ValueError(f"`{name}` must be {' and '.join(rules)}, got {value}.")


def check_bool(name: str, value: object) -> None:
    """Check that an argument is True or False: a text such as ``"no"`` would count as True.

    >>> check_bool("shuffle", "no")
    Traceback (most recent call last):
    TypeError: `shuffle` must be True or False, got 'no'.

    Args:
        name: The name of the argument in error messages.
        value: The value to check.

    Raises:
        TypeError: If the value is no ``bool``.
    """
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")


def check_instance(name: str, value: object, kind: type | UnionType, called: str, remedy: str = "") -> None:
    """Check that an argument is an object of a class.

    >>> check_instance("path", 1.0, str | None, "a text or None")
    Traceback (most recent call last):
    TypeError: `path` must be a text or None, got a float.

    Args:
        name: The name of the argument in error messages.
        value: The value to check.
        kind: The class or classes.
        called: What the error calls them, with an article.
        remedy: What to do about it, as a sentence.

    Raises:
        TypeError: If the value is none of theirs.
    """
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` must be {called}, got a {type(value).__name__}. {remedy}".rstrip())


def look_up(name: Any, named: Mapping[str, T], argument: str = "name") -> T:
    """Return the object of a name.

    Args:
        name: The name to look up.
        named: The objects by name.
        argument: The argument that holds the name, for the error.

    Raises:
        KeyError: If no object has this name; the message lists the names.
    """
    try:
        return named[name]
    except (KeyError, TypeError):  # a list, for example, has no hash
        got = repr(name) if isinstance(name, str | list) else f"a {type(name).__name__}. Pass its name"
        raise KeyError(f"`{argument}` must be one of {sorted(named)}, got {got}.") from None


def misfit(function: Callable[..., object], /, *args: object, **kwargs: object) -> str:
    """Return why a function cannot be called with some arguments; empty if it can, or if it has no signature.

    >>> misfit(len, [])
    ''
    >>> misfit(lambda model: model, "model", "batch")
    'too many positional arguments'

    Args:
        function: The function. It is not called.
        args: The arguments by position.
        kwargs: The arguments by name.
    """
    try:
        signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # no signature
        pass
    return ""


def did_you_mean(given: Iterable[str], known: Collection[str]) -> str:
    """Return a sentence with the known names that are similar to those that were given; empty without any.

    >>> did_you_mean(["epochs", "steps"], ["epoch", "update"])
    " Did you mean 'epoch'?"

    Args:
        given: The names that were given.
        known: The names that there are.
    """
    close = dict.fromkeys(match for each in given for match in get_close_matches(each, known, 1))
    return f" Did you mean {', '.join(map(repr, close))}?" if close else ""


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that an argument is one of some texts.

    >>> check_choice("split", "random", ("contiguous", "strided"))
    Traceback (most recent call last):
    ValueError: `split` must be 'contiguous' or 'strided', got 'random'.

    Args:
        name: The name of the argument in error messages.
        value: The value to check.
        choices: The texts that are allowed.

    Raises:
        ValueError: If the value is none of them.
    """
    if value not in choices:
        *others, last = map(repr, choices)
        listed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"`{name}` must be {listed}, got {value!r}.{did_you_mean([str(value)], choices)}")


def check_mode(mode: Mode, name: str) -> Mode:
    """Check which values of a name are better, and return ``"max"`` or ``"min"``, also for ``"auto"``.

    >>> check_mode("auto", "validation/main/accuracy"), check_mode("auto", "validation/main/loss")
    ('max', 'min')

    Args:
        mode: The argument to check. ``"auto"`` is that of Chainer: ``"max"`` for a name that contains ``accuracy``,
            otherwise ``"min"``.
        name: The name of the observed value.

    Raises:
        ValueError: If the mode is unknown.
    """
    check_choice("mode", mode, ("auto", "min", "max"))
    return mode if mode != "auto" else "max" if "accuracy" in name else "min"
