"""The rendezvous of torchrun's agent on a single machine."""

from __future__ import annotations

from typing import Final

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from lockstep.communicators import LOOPBACK, listening_store

TIMEOUT: Final = 600
"""Seconds that the agent waits for its own store, as in torch's static rendezvous."""


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of an agent that has no other agent to meet.

    Its store, where the ranks meet, listens on the loopback. Unlike torch's c10d rendezvous, it unpickles nothing that
    is in the store, which every user of the machine can write to.

    Args:
        parameters: What the agent was told about the rendezvous.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__(LOOPBACK, 0, rank=0, world_size=1, run_id=parameters.run_id, timeout=TIMEOUT)
        self._backend = parameters.backend

    def get_backend(self) -> str:
        """Return the name under which torch knows this class."""
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new store for the processes that the agent starts next."""
        # The store of the previous start has the addresses of dead processes, for which gloo would wait.
        store = listening_store(LOOPBACK, 0, self.timeout)
        return RendezvousInfo(store, self.rank, self.world_size, RendezvousStoreInfo(LOOPBACK, store.port))
