"""What one update does, from taking the batch to counting it."""

from lockstep.updaters.updater import Result as Result
from lockstep.updaters.updater import Updater as Updater
