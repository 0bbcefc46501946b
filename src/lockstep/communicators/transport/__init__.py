"""Move bytes between ranks: point to point, small messages to all, and torch's collectives."""

from lockstep.communicators.transport.channel import (
    PAIR as PAIR,
    Channel as Channel,
    Parcel as Parcel,
    Posted as Posted,
    Works as Works,
)
from lockstep.communicators.transport.messages import Table as Table, exchange as exchange
from lockstep.communicators.transport.packing import (
    LONG as LONG,
    all_reduce as all_reduce,
    begin_all_reduce as begin_all_reduce,
    broadcast as broadcast,
    pack as pack,
    plan_packets as plan_packets,
    unpack as unpack,
)
