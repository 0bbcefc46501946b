"""`ReplicaGroup`: the forward and backward of one model on several devices."""

from lockstep.replicas.group.group import ReplicaGroup as ReplicaGroup
