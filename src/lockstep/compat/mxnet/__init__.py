"""MXNet's interface: `DataParallelExecutorGroup`, `DataDesc`, `DataBatch`, `KVStore`, and its way to split a batch.

References: Apache MXNet 1.9.1 (Chen et al., "MXNet: A Flexible and Efficient Machine Learning Library for
Heterogeneous Distributed Systems", 2015, arXiv:1512.01274), for the names and their meaning.
"""

from lockstep.compat.mxnet.group import (
    DataBatch as DataBatch,
    DataDesc as DataDesc,
    DataParallelExecutorGroup as DataParallelExecutorGroup,
    split_input_slice as split_input_slice,
)
from lockstep.compat.mxnet.kvstore import KVStore as KVStore
