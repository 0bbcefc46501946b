"""One model on several devices of this process."""

from lockstep.replicas.data_parallel import DataParallel as DataParallel
from lockstep.replicas.group import ReplicaGroup as ReplicaGroup
from lockstep.replicas.monitor import Monitor as Monitor
from lockstep.replicas.on_device import OnDevice as OnDevice
