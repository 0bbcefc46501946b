"""What only this library can know went wrong.

Bad arguments raise `ValueError` or `TypeError`, as everywhere in Python. The classes here are for
what no argument check can see: a replica or another process that failed at work, processes that
disagree, a gradient that stayed non-finite, calls out of order, a state that does not fit.
"""


class LockstepError(Exception):
    """The base of the errors below, for those who want to catch them all."""


class OrderError(LockstepError, RuntimeError):
    """A call came before the one it builds on, or after the end."""


class EndOfDataError(LockstepError, RuntimeError):
    """The iterator ended before the run; the state is that after the last update."""


class ReplicaError(LockstepError, RuntimeError):
    """The work of one shard raised, and the original error is the ``__cause__``; or its thread hung.

    Attributes:
        device: The device of the replica that failed, as text.
        shard: The index of the shard it was working on; None where that is not known.
    """

    def __init__(self, message: str, *, device: str, shard: int | None) -> None:
        super().__init__(message)
        self.device = device
        self.shard = shard


class ReplicaInterrupt(KeyboardInterrupt):
    """Ctrl-C came while devices were at work; whoever catches `KeyboardInterrupt` catches it.

    Attributes:
        devices: The devices that were at work, as text.
    """

    def __init__(self, message: str, *, devices: list[str]) -> None:
        super().__init__(message)
        self.devices = devices


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


class DisagreementError(LockstepError, RuntimeError):
    """Ranks that must be alike are not.

    Attributes:
        rank: The first rank that differs from rank 0.
        subject: What differs: the name of a tensor, or of a field of the configuration.
        update: After how many updates that was seen; None where no update is meant.
    """

    def __init__(self, message: str, *, rank: int, subject: str, update: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.subject = subject
        self.update = update


class PeerError(LockstepError, RuntimeError):
    """Another rank failed; here everything is as it was after the last update.

    Attributes:
        rank: The rank that failed; None where only the connection tells that one did.
        phase: What it was doing, as far as is known.
        traceback: Its own traceback as text; empty where it could not send one.
    """

    def __init__(self, message: str, *, rank: int | None, phase: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.traceback = traceback


class PeerInterrupt(KeyboardInterrupt):
    """Ctrl-C came to another rank, and this one stops with it, where everything is as after the last update.

    Whoever catches `KeyboardInterrupt` catches it.

    Attributes:
        rank: The rank that was interrupted.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class StateError(LockstepError, ValueError):
    """A saved state does not fit what it is loaded into; nothing has been changed."""


class RandomStreamWarning(UserWarning):
    """Something drew from a random source that belongs to no shard, so shards now run one at a time."""


class ReplayWarning(UserWarning):
    """Batches are loaded once more and dropped, because their source cannot begin in the middle."""
