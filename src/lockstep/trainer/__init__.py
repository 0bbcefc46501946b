"""The training loop and its extensions."""

from lockstep.trainer.emergency import (
    any_rank as any_rank,
    reason_of as reason_of,
    wait_for_writers as wait_for_writers,
    write_emergency as write_emergency,
)
from lockstep.trainer.extension import (
    EDITOR as EDITOR,
    READER as READER,
    WRITER as WRITER,
    Extension as Extension,
    FunctionExtension as FunctionExtension,
    as_extension as as_extension,
    make_extension as make_extension,
)
from lockstep.trainer.model_summary import ModelSummary as ModelSummary, summarize_model as summarize_model
from lockstep.trainer.trainer import Trainer as Trainer
