"""Synchronous data-parallel training for PyTorch whose result does not depend on where it ran.

    import lockstep as ls

The names below are the public interface. `docs/` explains how they fit together.
"""

import sys as _sys
import typing as _typing

from lockstep import (
    data as data,
    extensions as extensions,
    metrics as metrics,
    optim as optim,
    snapshots as snapshots,
    triggers as triggers,
)
from lockstep._version import __version__ as __version__
from lockstep.communicators import (
    Communicator as Communicator,
    LocalCommunicator as LocalCommunicator,
    ProcessCommunicator as ProcessCommunicator,
    find_communicator as find_communicator,
)
from lockstep.data import (
    BatchIterator as BatchIterator,
    IterableBatches as IterableBatches,
    Samples as Samples,
    collate as collate,
)
from lockstep.digest import digest as digest
from lockstep.elsewhere import missing_name as _missing_name
from lockstep.errors import (
    DeterminismWarning as DeterminismWarning,
    DisagreementError as DisagreementError,
    EndOfDataError as EndOfDataError,
    FaultError as FaultError,
    LockstepError as LockstepError,
    NonFiniteError as NonFiniteError,
    NonFiniteWarning as NonFiniteWarning,
    OrderError as OrderError,
    PartError as PartError,
    PeerError as PeerError,
    PeerInterrupt as PeerInterrupt,
    PortableKernelsError as PortableKernelsError,
    RandomStreamWarning as RandomStreamWarning,
    ReplayWarning as ReplayWarning,
    ReplicaError as ReplicaError,
    ReplicaInterrupt as ReplicaInterrupt,
    SideFileError as SideFileError,
    SideFileWarning as SideFileWarning,
    SignalExit as SignalExit,
    SnapshotError as SnapshotError,
    SnapshotWarning as SnapshotWarning,
    StateError as StateError,
    WorkerError as WorkerError,
)
from lockstep.launch import launch as launch
from lockstep.metrics import report as report
from lockstep.optim import CorrectedMomentumSGD as CorrectedMomentumSGD, MomentumSGD as MomentumSGD
from lockstep.portable import (
    use_portable_kernels as use_portable_kernels,
    use_portable_kernels_if_asked as _use_portable_kernels_if_asked,
)
from lockstep.precision import (
    DynamicLossScale as DynamicLossScale,
    LossScale as LossScale,
    LossScaler as LossScaler,
    MasterWeights as MasterWeights,
    RampLossScale as RampLossScale,
    StaticLossScale as StaticLossScale,
)
from lockstep.prediction import predict as predict
from lockstep.replicas import (
    DataParallel as DataParallel,
    Monitor as Monitor,
    OnDevice as OnDevice,
    ReplicaGroup as ReplicaGroup,
    use_deterministic_kernels as use_deterministic_kernels,
)
from lockstep.streams import seed_everything as seed_everything
from lockstep.trainer import (
    Extension as Extension,
    ModelSummary as ModelSummary,
    Trainer as Trainer,
    summarize_model as summarize_model,
)
from lockstep.tuning import (
    BatchSizeFinderResult as BatchSizeFinderResult,
    LRFinderResult as LRFinderResult,
    find_batch_size as find_batch_size,
    find_lr as find_lr,
)
from lockstep.updaters import (
    BatchLoss as BatchLoss,
    Carried as Carried,
    Loss as Loss,
    ParallelUpdater as ParallelUpdater,
    StandardUpdater as StandardUpdater,
    Updater as Updater,
    UpdateResult as UpdateResult,
    supervised as supervised,
    token_mean as token_mean,
)

# Here, because the program may use torch as soon as this module is imported.
_use_portable_kernels_if_asked()

if not _typing.TYPE_CHECKING:  # checkers of types know which names there are

    def __getattr__(name: str) -> object:
        """Raise an error that says where the name is, or what it is called here."""
        raise _missing_name(_sys.modules[__name__], name, [extensions, metrics, triggers, optim, data])
