"""Passes over data without training: predictions, and what evaluations share with them."""

from lockstep.prediction.batches import (
    as_cuttable as as_cuttable,
    in_held_precision as in_held_precision,
    windows as windows,
)
from lockstep.prediction.evaluation_mode import (
    NO_OUTPUT as NO_OUTPUT,
    evaluation_mode as evaluation_mode,
    recording_outputs as recording_outputs,
)
from lockstep.prediction.predict import predict as predict
from lockstep.prediction.prediction import Prediction as Prediction
from lockstep.prediction.rank_exchange import RankExchange as RankExchange
