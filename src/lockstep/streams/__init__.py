"""Random numbers that belong to a shard, independently of the thread, process or device that computes it.

There are two ways to open a stream, and both give the same bits. If the shards of a process are computed one at a time,
`DefaultStream` seeds the default generators before each shard. If several threads compute shards at the same time, that
does not work, because a process has only one default CPU generator. In that case `StreamOverride` and `shard_stream`
make every thread draw from a generator of its own, and `DefaultGeneratorGuard` detects operations that drew from the
default generator nevertheless.
"""

from lockstep.streams.override import (
    StreamOverride as StreamOverride,
    StreamOverrideError as StreamOverrideError,
    shard_stream as shard_stream,
)
from lockstep.streams.seeding import (
    DRAWS as DRAWS,
    moved as moved,
    python_states as python_states,
    restored_generators as restored_generators,
    seed_default_generators as seed_default_generators,
    seed_everything as seed_everything,
    seed_python_and_numpy as seed_python_and_numpy,
)
from lockstep.streams.seeds import (
    INITIALISATION as INITIALISATION,
    STEP as STEP,
    computation_substream as computation_substream,
    stream_seed as stream_seed,
    substream as substream,
)
from lockstep.streams.serial import DEFAULT_GENERATOR_LOCK as DEFAULT_GENERATOR_LOCK, DefaultStream as DefaultStream
from lockstep.streams.state import THREAD_STREAMS as THREAD_STREAMS, DefaultGeneratorGuard as DefaultGeneratorGuard
