"""DCGAN's update as PyTorch's example has it: with one shard the plain loop's weights and running statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.ranks import launch_on_ranks

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
