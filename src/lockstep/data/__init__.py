"""Batches of a dataset whose order and state depend on nothing but the seed, and how they become tensors."""

from lockstep.data.batch_fingerprint import Fingerprint as Fingerprint, fingerprint as fingerprint
from lockstep.data.batch_iterator import BatchIterator as BatchIterator
from lockstep.data.collate import collate as collate
from lockstep.data.iterable_batches import IterableBatches as IterableBatches, as_iterator as as_iterator
from lockstep.data.iterator import Iterator as Iterator
from lockstep.data.samples import Samples as Samples
from lockstep.data.source import Source as Source
