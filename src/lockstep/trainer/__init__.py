"""The training loop, and what may be hung into it."""

from lockstep.trainer.extension import EDITOR as EDITOR
from lockstep.trainer.extension import READER as READER
from lockstep.trainer.extension import WRITER as WRITER
from lockstep.trainer.extension import Extension as Extension
from lockstep.trainer.extension import FunctionExtension as FunctionExtension
from lockstep.trainer.extension import make_extension as make_extension
from lockstep.trainer.trainer import Trainer as Trainer
