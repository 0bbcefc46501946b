"""What one update does, from taking the batch to counting it."""

from lockstep.updaters.loss import Loss as Loss
from lockstep.updaters.loss import LossFunction as LossFunction
from lockstep.updaters.loss import supervised as supervised
from lockstep.updaters.parallel import ParallelUpdater as ParallelUpdater
from lockstep.updaters.result import UpdateResult as UpdateResult
from lockstep.updaters.standard import StandardUpdater as StandardUpdater
from lockstep.updaters.updater import Result as Result
from lockstep.updaters.updater import Updater as Updater
