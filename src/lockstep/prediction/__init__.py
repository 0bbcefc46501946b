"""Passes over data without training: predictions, and what evaluations share with them."""

from lockstep.prediction.batches import (
    DataPass as DataPass,
    in_held_precision as in_held_precision,
    runner_of as runner_of,
)
from lockstep.prediction.evaluation_mode import NO_OUTPUT as NO_OUTPUT, recording_outputs as recording_outputs
from lockstep.prediction.predict import predict as predict
from lockstep.prediction.prediction import Prediction as Prediction
