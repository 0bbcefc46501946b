"""What processes tell each other: small messages, weights, and the sum of their gradients."""

from lockstep.communicators.communicator import Communicator as Communicator
from lockstep.communicators.communicator import Contribution as Contribution
from lockstep.communicators.communicator import PendingSum as PendingSum
from lockstep.communicators.local import LocalCommunicator as LocalCommunicator
from lockstep.communicators.messages import Table as Table
from lockstep.communicators.process import ProcessCommunicator as ProcessCommunicator
from lockstep.communicators.process import find_communicator as find_communicator
