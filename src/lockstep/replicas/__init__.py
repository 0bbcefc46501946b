"""One model on several devices of this process."""

from lockstep.replicas.group import ReplicaGroup as ReplicaGroup
