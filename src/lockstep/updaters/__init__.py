"""What one update does, from taking the batch to counting it."""

from lockstep.updaters.loss import Loss as Loss, LossFunction as LossFunction, supervised as supervised
from lockstep.updaters.parallel import ParallelUpdater as ParallelUpdater
from lockstep.updaters.result import UpdateResult as UpdateResult
from lockstep.updaters.setup import MAIN as MAIN, Converter as Converter, by_name as by_name, look_up as look_up
from lockstep.updaters.standard import StandardUpdater as StandardUpdater
from lockstep.updaters.token_mean import token_mean as token_mean
from lockstep.updaters.updater import Result as Result, Updater as Updater
