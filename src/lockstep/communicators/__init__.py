"""Communication between the processes of a run: control messages, weights, and sums of gradients."""

from lockstep.communicators.communicator import (
    Communicator as Communicator,
    Contribution as Contribution,
    PendingSum as PendingSum,
    SumAudit as SumAudit,
    SumFault as SumFault,
)
from lockstep.communicators.comparison import (
    Difference as Difference,
    StateComparer as StateComparer,
    check_fields as check_fields,
    compare as compare,
    first_difference as first_difference,
    gather as gather,
)
from lockstep.communicators.environment import (
    BRIEF_ENV as BRIEF_ENV,
    LOOPBACK as LOOPBACK,
    SHUTDOWN_ENV as SHUTDOWN_ENV,
    TIMEOUT_ENV as TIMEOUT_ENV,
    RunEnvironment as RunEnvironment,
    read_environment as read_environment,
    shutdown_timeout_for as shutdown_timeout_for,
    timeout_for as timeout_for,
    use_loopback as use_loopback,
)
from lockstep.communicators.failures.exits import (
    AGENT_ENV as AGENT_ENV,
    AgentDeadline as AgentDeadline,
    end_with_parent as end_with_parent,
)
from lockstep.communicators.failures.failure import traceback_text as traceback_text
from lockstep.communicators.failures.watch import Watch as Watch
from lockstep.communicators.joining import is_ip_address as is_ip_address, listening_store as listening_store
from lockstep.communicators.kernel_class import kernel_class as kernel_class, self_test as self_test
from lockstep.communicators.local import LocalCommunicator as LocalCommunicator
from lockstep.communicators.process import (
    ProcessCommunicator as ProcessCommunicator,
    find_communicator as find_communicator,
)
from lockstep.communicators.sums.small import SmallSum as SmallSum
from lockstep.communicators.transport.channel import refusing_collectives as refusing_collectives
from lockstep.communicators.transport.messages import MessageTable as MessageTable
