"""One model on several devices of this process."""

from lockstep.replicas.group import ReplicaGroup as ReplicaGroup
from lockstep.replicas.on_device import OnDevice as OnDevice
