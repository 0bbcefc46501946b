"""Passes over data without training: predictions, and what evaluations share with them."""

from lockstep.prediction.data_pass import (
    DataPass as DataPass,
    check_one_pass as check_one_pass,
    in_held_precision as in_held_precision,
    rewound as rewound,
    runner_of as runner_of,
)
from lockstep.prediction.predict import Prediction as Prediction, predict as predict
