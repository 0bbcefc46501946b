"""Data transfer between ranks: point-to-point, control messages, and torch's collectives."""

from lockstep.communicators.transport.channel import (
    PAIR_SIZE as PAIR_SIZE,
    Channel as Channel,
    PeerTensor as PeerTensor,
    PostedWork as PostedWork,
    refusing_collectives as refusing_collectives,
)
from lockstep.communicators.transport.messages import (
    ROW_ALIGNMENT as ROW_ALIGNMENT,
    MessageTable as MessageTable,
    exchange as exchange,
)
from lockstep.communicators.transport.packing import (
    LONG_TENSOR_BYTES as LONG_TENSOR_BYTES,
    TensorSpec as TensorSpec,
    all_reduce as all_reduce,
    begin_all_reduce as begin_all_reduce,
    broadcast as broadcast,
    gather_owned as gather_owned,
    plan_packets as plan_packets,
    unpack as unpack,
)
