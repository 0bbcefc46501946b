"""Detect failures of other ranks, report this rank's own, and end processes in order."""

from lockstep.communicators.failures.exits import (
    AGENT_ENV as AGENT_ENV,
    AgentDeadline as AgentDeadline,
    PeerErrorHook as PeerErrorHook,
    end_with_agent as end_with_agent,
    end_with_parent as end_with_parent,
)
from lockstep.communicators.failures.failure import (
    Failure as Failure,
    is_of_transport as is_of_transport,
    traceback_text as traceback_text,
)
from lockstep.communicators.failures.watch import (
    START as START,
    Watch as Watch,
    watch_group as watch_group,
)
