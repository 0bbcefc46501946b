"""DCGAN's update as PyTorch's example has it: with one shard the plain loop's weights and running statistics."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.ranks import launch_on_ranks
from tests.support.runs import finalized

LATENT = 6
UPDATES = 5
BATCH = 8


def networks() -> dict[str, nn.Module]:
    """Build the networks of the example, with fewer channels and smaller pictures."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nets = {
            "gen": nn.Sequential(
                nn.ConvTranspose2d(LATENT, 8, 4, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(True),
                nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
                nn.Tanh(),
            ),
            "dis": nn.Sequential(
                nn.Conv2d(1, 8, 4, 2, 1, bias=False),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(8, 8, 3, 1, 1, bias=False),
                nn.BatchNorm2d(8),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(8, 1, 4, bias=False),
                nn.Flatten(0),
                nn.Sigmoid(),
            ),
        }
        for net in nets.values():
            net.apply(initialize)
        return nets


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(BATCH, 1, 8, 8, generator=generator), torch.randn(BATCH, LATENT, 1, 1, generator=generator))
        for _ in range(UPDATES)
    ]


def adams(nets: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for name, net in nets.items()}


def plain_loop(nets: dict[str, nn.Module]) -> None:
    """Train as ``dcgan/main.py`` does: the generator runs once, and both losses use what it returned."""
    optimizers, criterion = adams(nets), nn.BCELoss()
    for real, noise in batches():
        optimizers["dis"].zero_grad()
        criterion(nets["dis"](real), torch.ones(BATCH)).backward()
        fake = nets["gen"](noise)
        criterion(nets["dis"](fake.detach()), torch.zeros(BATCH)).backward()
        optimizers["dis"].step()
        optimizers["gen"].zero_grad()
        criterion(nets["dis"](fake), torch.ones(BATCH)).backward()
        optimizers["gen"].step()


def discriminator_loss(nets: dict[str, nn.Module], real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    criterion = nn.BCELoss()
    with torch.no_grad():
        fake = nets["gen"](noise)
    right = criterion(nets["dis"](real), torch.ones(len(real)))
    loss: torch.Tensor = right + criterion(nets["dis"](fake), torch.zeros(len(real)))
    return loss


def generator_loss(nets: dict[str, nn.Module], _: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = nn.BCELoss()(nets["dis"](nets["gen"](noise)), torch.ones(len(noise)))
    return loss


def step(updater: ls.ParallelUpdater, batch: Any) -> None:
    # The generator runs in both computations, and only the second one counts in its running statistics.
    updater.compute_gradients(batch, loss_fn=discriminator_loss, optimizer="dis", buffers_of=["dis"])
    updater.apply_gradients("dis")
    updater.compute_gradients(batch, loss_fn=generator_loss, optimizer="gen")
    updater.apply_gradients("gen")


def step_with_all_buffers(updater: ls.ParallelUpdater, batch: Any) -> None:
    for name, loss_fn in (("dis", discriminator_loss), ("gen", generator_loss)):
        updater.compute_gradients(batch, loss_fn=loss_fn, optimizer=name)
        updater.apply_gradients(name)


def updater_of(
    nets: dict[str, nn.Module], devices: int, num_shards: int, step_fn: Any = step, **options: Any
) -> ls.ParallelUpdater:
    return ls.ParallelUpdater(
        batches(), adams(nets), nets, devices=["cpu"] * devices, num_shards=num_shards, step_fn=step_fn, **options
    )


def trained(devices: int, num_shards: int, step_fn: Any = step) -> dict[str, nn.Module]:
    nets = networks()
    updater = updater_of(nets, devices, num_shards, step_fn)
    for _ in range(UPDATES):
        updater.update()
    updater.finalize()
    return nets


def num_batches(nets: dict[str, nn.Module]) -> dict[str, int]:
    found = {}
    for name, net in nets.items():
        (norm,) = (module for module in net if isinstance(module, nn.BatchNorm2d))  # type: ignore[attr-defined]
        assert norm.num_batches_tracked is not None
        found[name] = int(norm.num_batches_tracked)
    return found


@pytest.mark.usefixtures("one_intra_op_thread")
def test_one_shard_has_the_weights_and_statistics_of_the_plain_loop() -> None:
    expected = networks()
    plain_loop(expected)
    found = trained(1, 1)
    assert num_batches(found) == num_batches(expected) == {"gen": UPDATES, "dis": 3 * UPDATES}
    for name, net in expected.items():
        for key, tensor in net.state_dict().items():
            assert torch.equal(found[name].state_dict()[key], tensor), (name, key)


def test_with_all_buffers_the_generators_statistics_count_twice() -> None:
    twice, once = trained(1, 1, step_with_all_buffers), trained(1, 1)
    assert num_batches(twice) == {"gen": 2 * UPDATES, "dis": 3 * UPDATES}
    # In training they are not read, so the weights are the same.
    assert all(map(torch.equal, twice["gen"].parameters(), once["gen"].parameters()))


def digests(devices: int) -> list[str]:
    return [ls.digest(net) for net in trained(devices, 4).values()]


def test_any_devices_and_ranks_reach_the_same_bits() -> None:
    expected = digests(1)
    assert digests(3) == expected
    assert launch_on_ranks(digests, 2, 1) == [expected] * 2


@pytest.mark.parametrize("names", [[], ["gen"], ["dis"], ["gen", "dis"], None])
def test_the_step_changes_the_buffers_of_these_models_only(names: list[str] | None) -> None:
    nets = networks()
    updater = updater_of(nets, 2, 2)
    updater.compute_gradients(batches()[0], loss_fn=discriminator_loss, optimizer="dis", buffers_of=names)
    before = {name: ls.digest(list(net.buffers())) for name, net in nets.items()}
    updater.apply_gradients("dis")
    changed = [name for name, net in nets.items() if ls.digest(list(net.buffers())) != before[name]]
    assert changed == (["gen", "dis"] if names is None else names)


def test_an_unknown_name_is_refused() -> None:
    updater = updater_of(networks(), 1, 1)
    with pytest.raises(KeyError, match=r"`buffers_of` must be one of \['dis', 'gen'\], got 'judge'"):
        updater.compute_gradients(batches()[0], loss_fn=discriminator_loss, buffers_of=["judge"])


def test_a_single_name_that_is_no_collection_is_refused() -> None:
    updater = updater_of(networks(), 1, 1)
    with pytest.raises(TypeError, match=r"`buffers_of` must be a collection of names, such as \['dis'\], got 'dis'"):
        updater.compute_gradients(batches()[0], loss_fn=discriminator_loss, buffers_of="dis")


class Norm(nn.Sequential):
    """A layer between two layers that keep batch statistics."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            super().__init__(nn.BatchNorm1d(6), nn.Linear(6, 4), nn.BatchNorm1d(4))


def squares(nets: dict[str, nn.Module], x: torch.Tensor) -> torch.Tensor:
    return sum(net(x).square().mean() for net in nets.values())  # type: ignore[return-value]


def cubes(nets: dict[str, nn.Module], x: torch.Tensor) -> torch.Tensor:
    return sum(net(x + 1).pow(3).mean() for net in nets.values())  # type: ignore[return-value]


def by_itself(updater: ls.ParallelUpdater, batch: Any, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """Step without the updater, as an optimizer with a step of another name does."""
    for name, loss_fn in (("gen", squares), ("dis", cubes)):
        updater.compute_gradients(batch, loss_fn=loss_fn, optimizer=name)
        optimizers[name].step()


def twice(updater: ls.ParallelUpdater, batch: Any, _: object) -> None:
    """Step by the second of two gradients for one optimizer, as sharpness-aware minimization does."""
    updater.compute_gradients(batch, loss_fn=squares, optimizer="gen")
    updater.get_all_optimizers()["gen"].zero_grad()
    updater.compute_gradients(batch, loss_fn=cubes, optimizer="gen")
    updater.apply_gradients("gen")


def before_both_steps(updater: ls.ParallelUpdater, batch: Any, _: object) -> None:
    """Compute for both optimizers before either steps."""
    for name, loss_fn in (("gen", squares), ("dis", cubes)):
        updater.compute_gradients(batch, loss_fn=loss_fn, optimizer=name)
    for name in ("dis", "gen"):
        updater.apply_gradients(name)


def left_by(function: Any, devices: int, *, in_update: bool) -> dict[str, torch.Tensor]:
    """Return the buffers after two updates by a function, as a step function or in a loop of one's own."""
    nets: dict[str, nn.Module] = {"gen": Norm(), "dis": Norm()}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.01) for name, net in nets.items()}
    data = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)),) for seed in range(2)]
    updater = ls.ParallelUpdater(
        data,
        optimizers,
        nets,
        devices=["cpu"] * devices,
        num_shards=devices,
        step_fn=(lambda updater, batch: function(updater, batch, optimizers)) if in_update else None,
        loss_fn=squares,
    )
    for batch in data:
        updater.update() if in_update else function(updater, batch, optimizers)
    updater.finalize()
    return {f"{name}.{key}": value for name, net in nets.items() for key, value in net.named_buffers()}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("function", "in_update", "forwards"),
    [(by_itself, True, 4), (twice, True, 4), (before_both_steps, True, 4), (before_both_steps, False, 4)],
)
def test_every_computation_of_an_update_leaves_its_buffers(
    function: Any, in_update: bool, forwards: int, devices: int
) -> None:
    found = left_by(function, devices, in_update=in_update)
    assert [found[f"{net}.{norm}.num_batches_tracked"] for net in ("gen", "dis") for norm in (0, 2)] == [forwards] * 4


@pytest.mark.usefixtures("one_intra_op_thread")
def test_with_one_shard_they_are_those_of_the_plain_loop() -> None:
    found = left_by(before_both_steps, 1, in_update=True)
    nets: dict[str, nn.Module] = {"gen": Norm(), "dis": Norm()}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.01) for name, net in nets.items()}
    for seed in range(2):
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        for name, loss_fn in (("gen", squares), ("dis", cubes)):
            gradients = torch.autograd.grad(loss_fn(nets, batch), [*nets[name].parameters()])
            for parameter, gradient in zip(nets[name].parameters(), gradients, strict=True):
                parameter.grad = gradient
        for each in optimizers.values():
            each.step()
    for name, net in nets.items():
        for key, value in net.named_buffers():
            assert torch.equal(found[f"{name}.{key}"], value), (name, key)


def test_an_update_that_fails_leaves_no_buffers() -> None:
    def fails(updater: ls.ParallelUpdater, batch: Any, optimizers: object) -> None:
        before_both_steps(updater, batch, optimizers)
        raise RuntimeError("in the middle")

    nets: dict[str, nn.Module] = {"gen": Norm(), "dis": Norm()}
    before = [ls.digest(list(net.buffers())) for net in nets.values()]
    updater = ls.ParallelUpdater(
        [(torch.randn(8, 6),)],
        {name: torch.optim.SGD(net.parameters(), lr=0.01) for name, net in nets.items()},
        nets,
        devices=["cpu"],
        step_fn=lambda updater, batch: fails(updater, batch, None),
    )
    with pytest.raises(RuntimeError, match="in the middle"):
        updater.update()
    assert [ls.digest(list(net.buffers())) for net in nets.values()] == before


@pytest.mark.parametrize("options", [{"clip_grad_norm": 0.1}, {"scheduler": True}, {}])
@pytest.mark.parametrize("applies", [True, False])
def test_what_a_step_function_leaves_out_is_warned_of_once(options: dict[str, Any], applies: bool) -> None:
    net = Norm()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if "scheduler" in options:
        options = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}

    def step_fn(updater: ls.ParallelUpdater, batch: Any) -> None:
        updater.compute_gradients(batch)
        updater.apply_gradients() if applies else optimizer.step()

    updater = ls.ParallelUpdater(
        [torch.randn(8, 6)] * 2,
        optimizer,
        net,
        devices=["cpu"],
        step_fn=step_fn,
        loss_fn=lambda net, x: net(x).square().mean(),
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        updater.update()
    updater.finalize()
    texts = [str(each.message) for each in caught]
    assert ["without apply_gradients(), so `clip_grad_norm` clips nothing" in text for text in texts] == [True] * (
        not applies and bool(options)
    )


def thrice(updater: ls.ParallelUpdater) -> None:
    for _ in range(3):
        updater.update()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_gradient_without_a_step_is_told_once(clip: float | None) -> None:
    net = Norm()
    updater = ls.ParallelUpdater(
        [torch.randn(8, 6)] * 3,
        torch.optim.SGD(net.parameters(), lr=0.01),
        net,
        devices=["cpu"],
        step_fn=lambda updater, batch: updater.compute_gradients(batch),
        loss_fn=lambda net, x: net(x).square().mean(),
        clip_grad_norm=clip,
    )
    with finalized(updater), pytest.warns(UserWarning, match="without a step, so nothing of it was trained") as said:
        thrice(updater)
    assert len(said) == 1


def test_a_loop_that_was_pasted_into_a_step_function_is_told_once() -> None:
    net = Norm()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step(_: ls.ParallelUpdater, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    updater = ls.ParallelUpdater([torch.randn(8, 6)] * 3, optimizer, net, devices=["cpu"], step_fn=step)
    with finalized(updater), pytest.warns(UserWarning, match=r"changed parameters without compute_gradients") as said:
        thrice(updater)
    assert len(said) == 1


def test_accumulation_is_refused_where_gradients_are_computed_by_batch() -> None:
    net = Norm()
    updater = ls.ParallelUpdater(
        [torch.randn(8, 6)],
        torch.optim.SGD(net.parameters(), lr=0.01),
        net,
        devices=["cpu"],
        accumulate=2,
        loss_fn=lambda net, x: net(x).square().mean(),
    )
    with finalized(updater), pytest.raises(ValueError, match=r"`accumulate` must be 1 where `compute_gradients` .* 2"):
        updater.compute_gradients(torch.randn(8, 6))
