"""Synchronous data-parallel training for PyTorch whose result does not depend on where it ran.

    import lockstep as ls

The names below are the public face; `docs/` says how they fit together.
"""

from lockstep import data as data
from lockstep import extensions as extensions
from lockstep import metrics as metrics
from lockstep import optim as optim
from lockstep import triggers as triggers
from lockstep._version import __version__ as __version__
from lockstep.communicators import Communicator as Communicator
from lockstep.communicators import LocalCommunicator as LocalCommunicator
from lockstep.communicators import ProcessCommunicator as ProcessCommunicator
from lockstep.communicators import find_communicator as find_communicator
from lockstep.data import BatchIterator as BatchIterator
from lockstep.data import IterableBatches as IterableBatches
from lockstep.data import Samples as Samples
from lockstep.data import collate as collate
from lockstep.digest import digest as digest
from lockstep.errors import DisagreementError as DisagreementError
from lockstep.errors import LockstepError as LockstepError
from lockstep.errors import NonFiniteError as NonFiniteError
from lockstep.errors import OrderError as OrderError
from lockstep.errors import PeerError as PeerError
from lockstep.errors import PeerInterrupt as PeerInterrupt
from lockstep.errors import RandomStreamWarning as RandomStreamWarning
from lockstep.errors import ReplayWarning as ReplayWarning
from lockstep.errors import ReplicaError as ReplicaError
from lockstep.errors import ReplicaInterrupt as ReplicaInterrupt
from lockstep.errors import StateError as StateError
from lockstep.launch import launch as launch
from lockstep.metrics import report as report
from lockstep.optim import CorrectedMomentumSGD as CorrectedMomentumSGD
from lockstep.optim import MomentumSGD as MomentumSGD
from lockstep.precision import DynamicLossScale as DynamicLossScale
from lockstep.precision import LossScale as LossScale
from lockstep.precision import LossScaler as LossScaler
from lockstep.precision import MasterWeights as MasterWeights
from lockstep.precision import RampLossScale as RampLossScale
from lockstep.precision import StaticLossScale as StaticLossScale
from lockstep.replicas import DataParallel as DataParallel
from lockstep.replicas import Monitor as Monitor
from lockstep.replicas import OnDevice as OnDevice
from lockstep.replicas import ReplicaGroup as ReplicaGroup
from lockstep.trainer import Extension as Extension
from lockstep.trainer import Trainer as Trainer
from lockstep.updaters import Loss as Loss
from lockstep.updaters import ParallelUpdater as ParallelUpdater
from lockstep.updaters import StandardUpdater as StandardUpdater
from lockstep.updaters import Updater as Updater
from lockstep.updaters import UpdateResult as UpdateResult
from lockstep.updaters import supervised as supervised
