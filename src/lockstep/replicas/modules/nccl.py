"""Send parameters to the replicas on other GPUs in one message."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.replicas.modules.flat_parameters import lay_end_to_end
from lockstep.replicas.pool.replica_set import ReplicaSet


class BroadcastingSet(ReplicaSet):
    """A `ReplicaSet` that sends parameters by NCCL if each replica has a GPU of its own, or else in the usual way.

    The parameters of the model must be stored end to end in one tensor, and then those of the replicas are as well. The
    bits that arrive are those that were sent.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receivers: list[torch.Tensor] = []

    def refresh(self) -> bool:
        """Update the replicas to the model (see `ReplicaSet.refresh`)."""
        rebuilt = super().refresh()
        if rebuilt:
            others = self._replicas[1:] if self._can_broadcast() else []
            self._receivers = [lay_end_to_end(list(replica.parameters())) for replica in others]
        return rebuilt

    @torch.no_grad()
    def sync_parameters(self) -> None:
        """Send the parameters of the model to all other GPUs."""
        if not self._receivers:
            super().sync_parameters()
            return
        # NCCL writes past the version counters, which are incremented as for a copy.
        self._copier.count_writes()
        sender = next(self.model.parameters()).detach()
        whole = sender.as_strided((self._receivers[0].numel(),), (1,))
        torch.cuda.nccl.broadcast([whole, *self._receivers], root=0)

    def _can_broadcast(self) -> bool:
        """Return whether there are several GPUs with one replica each, and the model is on the first one."""
        return (
            len(self.devices) > 1
            and len(set(self.devices)) == len(self.devices)
            and {parameter.device for parameter in self.model.parameters()} == {self.devices[0]}
            and all(device.type == "cuda" for device in self.devices)
        )
