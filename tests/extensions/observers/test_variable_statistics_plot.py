"""Statistics of all parameters and gradients, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import StateError
from lockstep.extensions import VariableStatisticsPlot
from lockstep.trainer import Trainer
from tests.support.runs import Placement, updater_for
from tests.support.workloads import TRANSFORMER

pytest.importorskip("matplotlib")

EACH = (1, "iteration")


def run(out: Path, plot: VariableStatisticsPlot, until: int = 4, devices: int = 1, state: Any = None) -> Trainer:
    trainer = Trainer(updater_for(TRANSFORMER, Placement(devices), num_shards=3), (until, "iteration"), out)
    trainer.extend(plot)
    if state is not None:
        trainer.load_state_dict(state)
    trainer.run()
    return trainer


def test_the_points_are_those_of_all_elements(tmp_path: Path) -> None:
    plot = VariableStatisticsPlot(trigger=EACH, percentiles=[0, 25, 50, 100])
    trainer = run(tmp_path, plot, until=2)
    model = trainer.updater.get_all_models()["main"]
    assert [update for update, _ in plot.points] == [1, 2]
    for kind, tensors in (
        ("data", [each.detach() for each in model.parameters()]),
        ("grad", [each.grad for each in model.parameters()]),
    ):
        elements = torch.cat([each.flatten().double() for each in tensors])
        mean, deviation, *percentiles = plot.points[-1][1][kind]
        assert (mean, deviation) == pytest.approx((elements.mean().item(), elements.std(correction=0).item()))
        expected = torch.quantile(elements, torch.tensor([0, 0.25, 0.5, 1.0], dtype=torch.float64))
        assert percentiles == pytest.approx(expected.tolist())
    data = (tmp_path / "statistics.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert {path.name for path in tmp_path.iterdir()} == {"statistics.png"}


@pytest.mark.slow
def test_placements_and_resumed_runs_have_the_same_points(tmp_path: Path) -> None:
    def plot() -> VariableStatisticsPlot:
        return VariableStatisticsPlot(trigger=EACH, max_points=3)

    whole, other, first, second = plot(), plot(), plot(), plot()
    run(tmp_path, whole, until=7)
    run(tmp_path, other, until=7, devices=2)
    state = run(tmp_path, first, until=4).state_dict()
    run(tmp_path, second, until=7, state=state)
    assert whole.points == other.points == second.points
    assert [update for update, _ in whole.points] == [1, 5]


def test_points_are_thinned_out(tmp_path: Path) -> None:
    plot = VariableStatisticsPlot(trigger=EACH, max_points=3, grads=False)
    run(tmp_path, plot, until=12)
    assert [update for update, _ in plot.points] == [1, 5, 9]
    assert [list(found) for _, found in plot.points] == [["data"]] * 3


def test_parameters_are_chosen_by_name(tmp_path: Path) -> None:
    plot = VariableStatisticsPlot(["head.bias"], trigger=EACH, filename="bias.svg")
    trainer = run(tmp_path, plot, until=1)
    bias = trainer.updater.get_all_models()["main"].head.bias.detach().double()
    assert plot.points[0][1]["data"][0] == pytest.approx(bias.mean().item())
    assert b"<svg" in (tmp_path / "bias.svg").read_bytes()
    with pytest.raises(ValueError, match=r"`parameters` must name some of embed\.weight, .* got 'tail'"):
        run(tmp_path, VariableStatisticsPlot(["tail"]))


def test_what_is_wrong_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`percentiles` must lie in 0..100, got 101"):
        VariableStatisticsPlot(percentiles=[50, 101])
    with pytest.raises(ValueError, match="`max_points` must be at least 2, got 1"):
        VariableStatisticsPlot(max_points=1)
    with pytest.raises(StateError, match="VariableStatisticsPlot must hold 'points'"):
        VariableStatisticsPlot().load_state_dict({})
