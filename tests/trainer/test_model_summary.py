"""The summary of a model: every parameter counts once."""

from __future__ import annotations

from torch import nn

import lockstep as ls


def test_tied_and_frozen_parameters_and_buffers() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    model[1].requires_grad_(requires_grad=False)
    summary = ls.summarize_model(model)
    assert [(row.name, row.kind, row.parameters, row.trained) for row in summary.rows] == [
        ("", "Sequential", 0, 0),
        ("0", "Embedding", 40, 40),
        ("1", "BatchNorm1d", 8, 0),
        ("2", "Linear", 0, 0),
    ]
    assert summary.parameters == sum(each.numel() for each in model.parameters())
    # Weights, and the mean, the variance and the count of the normalization.
    assert (summary.trained, summary.size) == (40, 4 * 48 + 4 * 8 + 8)


def test_lazy_parameters_count_as_nothing() -> None:
    assert ls.summarize_model(nn.LazyLinear(4)).parameters == 0
