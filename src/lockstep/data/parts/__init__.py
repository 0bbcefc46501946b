"""Data in files and streams: read in blocks, side by side, so that each process reads only what its shards need."""

from lockstep.data.parts.dataset import (
    Parts as Parts,
    SectionOrder as SectionOrder,
    num_shared as num_shared,
    positions_by_worker as positions_by_worker,
)
from lockstep.data.parts.files import (
    ParquetRows as ParquetRows,
    Safetensors as Safetensors,
    TarSamples as TarSamples,
    TextLines as TextLines,
    Tokens as Tokens,
)
from lockstep.data.parts.part import Part as Part
from lockstep.data.parts.streams import StreamPart as StreamPart
