"""The stages of an update, and the objects that run them."""

from lockstep.updaters.step.assembly import Schedulers as Schedulers, assemble as assemble
from lockstep.updaters.step.checks import check_communicator as check_communicator
from lockstep.updaters.step.custom_step import CustomStep as CustomStep
