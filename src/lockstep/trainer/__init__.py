"""The training loop and its extensions."""

from lockstep.trainer.extension import (
    EDITOR as EDITOR,
    READER as READER,
    WRITER as WRITER,
    Extension as Extension,
    FunctionExtension as FunctionExtension,
    make_extension as make_extension,
)
from lockstep.trainer.model_summary import ModelSummary as ModelSummary, summarize_model as summarize_model
from lockstep.trainer.trainer import Trainer as Trainer
