"""Random numbers that belong to a shard, whichever thread, process or device computes it.

Two ways lead to the same bits. Where shards of one process are computed one at a time, the default
generators are seeded before each (`DefaultStream`). Where several threads compute at once, that
cannot work, because the default CPU generator is one per process: there every thread draws from
a generator of its own (`StreamOverride` and `shard_stream`), and a `DefaultGeneratorGuard` tells
whether something drew past it.
"""

from lockstep.streams.guard import DefaultGeneratorGuard as DefaultGeneratorGuard
from lockstep.streams.override import (
    StreamOverride as StreamOverride,
    StreamOverrideError as StreamOverrideError,
    shard_stream as shard_stream,
)
from lockstep.streams.seeds import stream_seed as stream_seed
from lockstep.streams.serial import ONE_BORROWER as ONE_BORROWER, DefaultStream as DefaultStream
from lockstep.streams.substreams import (
    INITIALISATION as INITIALISATION,
    STEP as STEP,
    computation_substream as computation_substream,
    substream as substream,
)
from lockstep.streams.thread import THREAD as THREAD, stream_is_open as stream_is_open
