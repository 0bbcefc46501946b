"""One model on several devices of this process."""

from __future__ import annotations

from lockstep.replicas.replica_set import ReplicaSet


class ReplicaGroup(ReplicaSet):
    """Copies of one model on several devices, with a persistent worker thread each."""
