"""Communication between the processes of a run: control messages, weights, and sums of gradients."""

from lockstep.communicators.agreement import (
    StateComparer as StateComparer,
    check_fields as check_fields,
    compare as compare,
    first_difference as first_difference,
)
from lockstep.communicators.communicator import (
    Communicator as Communicator,
    Contribution as Contribution,
    PendingSum as PendingSum,
)
from lockstep.communicators.environment import (
    BRIEF_ENV as BRIEF_ENV,
    TIMEOUT_ENV as TIMEOUT_ENV,
    RunEnvironment as RunEnvironment,
    read_environment as read_environment,
    timeout_for as timeout_for,
)
from lockstep.communicators.failures import AGENT_ENV as AGENT_ENV, Watch as Watch, end_with_parent as end_with_parent
from lockstep.communicators.kernel_class import kernel_class as kernel_class, self_test as self_test
from lockstep.communicators.local import LocalCommunicator as LocalCommunicator
from lockstep.communicators.process import (
    ProcessCommunicator as ProcessCommunicator,
    find_communicator as find_communicator,
)
from lockstep.communicators.sums import is_pair as is_pair
from lockstep.communicators.transport import Table as Table
