"""What only this library can know went wrong.

Bad arguments raise `ValueError` or `TypeError`, as everywhere in Python. The classes here are for
what no argument check can see: a replica that failed at work, a gradient that stayed non-finite,
calls out of order, a state that does not fit.
"""


class LockstepError(Exception):
    """The base of the errors below, for those who want to catch them all."""


class OrderError(LockstepError, RuntimeError):
    """A call came before the one it builds on, or after the end."""


class ReplicaError(LockstepError, RuntimeError):
    """The work of one shard raised; the original error is the ``__cause__``.

    Attributes:
        device: The device of the replica that failed, as text.
        shard: The index of the shard it was working on; None where that is not known.
    """

    def __init__(self, message: str, *, device: str, shard: int | None) -> None:
        super().__init__(message)
        self.device = device
        self.shard = shard


class NonFiniteError(LockstepError, ArithmeticError):
    """The gradient of a batch was not finite and nothing was left to try; the weights are unchanged.

    Attributes:
        parameter: The name of the first parameter whose gradient is not finite.
        tries: How many times the batch was tried.
    """

    def __init__(self, message: str, *, parameter: str, tries: int) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.tries = tries


class StateError(LockstepError, ValueError):
    """A saved state does not fit what it is loaded into; nothing has been changed."""


class RandomStreamWarning(UserWarning):
    """Something drew from a random source that belongs to no shard, so shards now run one at a time."""


class ReplayWarning(UserWarning):
    """Batches are loaded once more and dropped, because their source cannot begin in the middle."""
