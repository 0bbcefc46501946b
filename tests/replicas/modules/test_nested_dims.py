"""Inputs and outputs that count samples in dimensions of their own, and outputs on a device that is chosen."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.emulated.pool import on_emulated_devices

DEVICES = [1, 2, 3]
STATES = {"input": 0, "hx": 1}


class Named(nn.Module):
    """Returns a dict, and takes a mask by keyword and a list of states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(
        self,
        x: torch.Tensor,
        states: Any = None,
        *,
        mask: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        x = x * self.weight if mask is None else x * mask.t() * self.weight
        x = x if table is None else x @ table
        return {"out": x, "states": None if states is None else [part * self.weight for part in states]}


def lstm(*, batch_first: bool = True) -> nn.LSTM:
    torch.manual_seed(0)
    return nn.LSTM(3, 4, num_layers=2, batch_first=batch_first).double()


def inputs(samples: int = 7, *, batch_first: bool = True) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((samples, 5, 3) if batch_first else (5, samples, 3)), (2, samples, 4), (2, samples, 4)
    x, h, c = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    return x, (h, c)


def gradients(model: nn.Module, *, batch_first: bool = True) -> list[torch.Tensor]:
    """Return outputs and gradients of a loss that uses each output differently, and every sample with every other."""
    x, (h, c) = inputs(batch_first=batch_first)
    output, (last_h, last_c) = model(x, (h, c))
    (output.square().mean() + last_h.exp().std() + last_c[1, 3:].sum()).backward()
    given = [output, last_h, last_c, x.grad, h.grad, c.grad, *[each.grad for each in model.parameters()]]
    return [tensor.detach() for tensor in given if tensor is not None]


@pytest.mark.usefixtures("one_intra_op_thread")
@pytest.mark.each_value
@pytest.mark.parametrize("parallel_backward", [True, False])
@pytest.mark.parametrize(
    "dim", [STATES, (0, 1), [0, (1, 1)], {"hx": (1, 1)}, {"hx": [1, -2]}, {"hx[0]": 1, "hx[1]": 1}]
)
def test_an_lstm_with_states_has_the_gradient_of_one_device(dim: Any, parallel_backward: bool) -> None:
    wanted = gradients(lstm())
    for devices in DEVICES:
        model = ls.DataParallel(
            lstm(), ["cpu"] * devices, dim=dim, output_dim=(0, 1), parallel_backward=parallel_backward
        )
        found = gradients(model)
        assert len(found) == len(wanted) == 14
        for own, other in zip(found, wanted, strict=True):
            assert own.shape == other.shape
            assert torch.allclose(own, other, rtol=1e-12, atol=1e-14)  # sums are in another order


@pytest.mark.parametrize("output_dim", [(0, 1), [0, (1, 1)], {"output[1]": 1}, {"output[1]": (1, 1)}])
def test_the_devices_do_not_matter(output_dim: Any) -> None:
    found = {
        ls.digest(
            gradients(ls.DataParallel(lstm(), ["cpu"] * devices, num_shards=3, dim=(0, 1), output_dim=output_dim))
        )
        for devices in DEVICES
    }
    assert len(found) == 1


def test_one_dimension_serves_inputs_and_outputs_as_before() -> None:
    model = ls.DataParallel(lstm(batch_first=False), ["cpu"] * 2, dim=1)
    for own, other in zip(
        gradients(model, batch_first=False), gradients(lstm(batch_first=False), batch_first=False), strict=True
    ):
        assert torch.allclose(own, other, rtol=1e-12, atol=1e-14)
    assert "devices=['cpu', 'cpu'], dim=1\n" in repr(model)


@pytest.mark.parametrize("dim", [STATES, (0, 1)])
def test_an_argument_may_be_left_out_of_a_call(dim: Any) -> None:
    model = ls.DataParallel(lstm(), ["cpu"] * 2, dim=dim, output_dim=(0, 1))
    x, _ = inputs()
    for given in ((x,), (x, None)):
        output, (h, _) = model(*given)
        assert output.shape == (7, 5, 4)
        assert h.shape == (2, 7, 4)


def test_names_keywords_and_inputs_given_whole() -> None:
    x, mask, table = torch.randn(6, 3), torch.rand(3, 6), torch.randn(3, 3)
    states = [torch.randn(6, 2), torch.randn(2, 6)]
    wanted = Named()(x, states, mask=mask, table=table)
    model = ls.DataParallel(
        Named(),
        ["cpu"] * 3,
        dim={"mask": 1, "table": None, "states": (0, 1)},
        output_dim={"states": (0, 1)},
    )
    found = model(x, states, mask=mask, table=table)
    assert torch.allclose(found["out"], wanted["out"])
    assert torch.equal(found["states"][1], wanted["states"][1])
    # An argument that a call leaves out may stay named, but not an output that the module does not return.
    with pytest.raises(ValueError, match="`output_dim` must name some of out, got 'states"):
        model(x)


def test_a_copy_and_a_pickle_keep_the_dimensions() -> None:
    model = ls.DataParallel(lstm(), ["cpu"] * 2, dim=(0, 1), output_dim=(0, 1), output_device="cpu")
    wanted = ls.digest(gradients(model))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own bytes
        copied.zero_grad()
        assert ls.digest(gradients(copied)) == wanted


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": "0"}, TypeError, "`dim` must be an integer, None, or a tuple, list or dict of these, got '0'"),
        ({"dim": (0, True)}, TypeError, r"`dim` must be an integer, None, .* got \(0, True\)"),
        ({"output_dim": (0, (1, 1.0))}, TypeError, r"`output_dim` must be an integer, None, .* got \(0, \(1, 1.0\)\)"),
        ({"output_device": "cuda:99"}, ValueError, "`output_device` must be one of the devices of this machine"),
    ],
)
def test_what_is_no_dimension_is_refused_at_once(arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ls.DataParallel(lstm(), ["cpu"] * 2, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": (0,)}, r"`dim` must have an entry for each argument, got \(0,\) without one for `hx`"),
        ({"dim": (0, (1,))}, r"`dim` must have an entry for `hx\[1\]`, got \(1,\)"),
        ({"dim": (0, (1, 1, 1))}, r"`dim` must name some of input, hx\[0\], hx\[1\], got 'hx\[2\]'"),
        ({"dim": (0, 1, 1)}, r"`dim` must name some of input, hx\[0\], hx\[1\], got 'args\[2\]'"),
        ({"dim": {"states": 1}}, r"`dim` must name some of input, hx\[0\], hx\[1\], got 'states'"),
        ({"dim": None}, "`dim` must name the dimension that counts samples for at least one input, got None"),
        ({"dim": (0, 3)}, r"`hx\[0\]` must have a dimension 3 to count samples by, got shape \(2, 7, 4\)"),
        ({"dim": 0}, r"`hx\[0\]` must hold as many samples as `input` \(7\) along dimension 0, got 2"),
        ({"dim": (0, 1), "output_dim": (0,)}, r"`output_dim` must have an entry for `output\[1\]\[0\]`, got \(0,\)"),
        ({"dim": (0, 1), "output_dim": (0, (1, 1), 0)}, r"`output_dim` must name some of .* got 'output\[2\]'"),
        ({"dim": (0, 1)}, r"`output\[1\]\[0\]` must hold the samples of its shard .* along dimension 0"),
    ],
)
def test_what_does_not_fit_a_call_is_refused(arguments: dict[str, Any], message: str) -> None:
    model = ls.DataParallel(lstm(), ["cpu"] * 2, **arguments)
    with pytest.raises(ValueError, match=message):
        model(*inputs())


def test_a_dict_of_a_group_takes_nests_too() -> None:
    group = ls.ReplicaGroup(lstm(), ["cpu"] * 2, batch_dim={"hx": (1, 1)}, output_dim={"output[1]": (1, 1)})
    x, states = inputs()
    group.forward((x.detach(), tuple(state.detach() for state in states)))
    h = group.outputs()[1]
    assert h.shape == (2, 7, 4)


@on_emulated_devices
def test_outputs_are_on_the_device_that_is_named() -> None:
    found = []
    for output_device in ("cpu", "emulated:0", "emulated:1", None):
        model = ls.DataParallel(
            nn.Linear(3, 2), ["emulated:0", "emulated:1"], num_shards=2, output_device=output_device
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        x = torch.arange(12.0).reshape(4, 3).requires_grad_()
        output = model(x)
        assert output.device == torch.device(output_device or "emulated:0")
        output.square().mean().backward()
        assert model.module.weight.grad.device == torch.device("emulated:0")
        found.append(ls.digest([output.detach().cpu(), x.grad, model.module.weight.grad.cpu()]))
    assert len(set(found)) == 1
