"""Iterators over batches whose order and state depend only on the seed, and the conversion of samples to tensors."""

from lockstep.data.batch_fingerprint import Fingerprint as Fingerprint, fingerprint as fingerprint
from lockstep.data.batch_iterator import BatchIterator as BatchIterator, OrderSampler as OrderSampler
from lockstep.data.collate import collate as collate
from lockstep.data.iterable_batches import (
    IterableBatches as IterableBatches,
    Source as Source,
    as_iterator as as_iterator,
    check_not_split_by_rank as check_not_split_by_rank,
)
from lockstep.data.iterator import Iterator as Iterator
from lockstep.data.parts.dataset import Parts as Parts, SectionOrder as SectionOrder
from lockstep.data.parts.files import (
    ParquetRows as ParquetRows,
    Safetensors as Safetensors,
    TarSamples as TarSamples,
    TextLines as TextLines,
    Tokens as Tokens,
)
from lockstep.data.parts.part import Part as Part
from lockstep.data.parts.streams import StreamPart as StreamPart
from lockstep.data.samples import MapDataset as MapDataset, Samples as Samples
