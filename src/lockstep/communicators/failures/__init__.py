"""Notice failures of other ranks, tell them about one's own, and end in order."""

from lockstep.communicators.failures.exits import (
    AGENT as AGENT,
    PeerErrorHook as PeerErrorHook,
    end_with_agent as end_with_agent,
    end_with_parent as end_with_parent,
)
from lockstep.communicators.failures.failure import Failure as Failure
from lockstep.communicators.failures.watch import (
    START as START,
    PeerWatch as PeerWatch,
    Watch as Watch,
    watch_group as watch_group,
)
