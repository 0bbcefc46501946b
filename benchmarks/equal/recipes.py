"""The recipes of `equal_digests.py`, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import lockstep as ls
from equal.losses import (
    in_float32,
    large_gradients,
    overflowing,
    partly_reached,
    partly_weightless,
    spoiled,
    weighted_by_tokens,
    weighted_on_device,
)
from equal.models import (
    BagOfWords,
    Noisy,
    OwnLoss,
    Reader,
    Recomputed,
    Recurrent,
    dicts,
    frozen_stem,
    half,
    images,
    lazy,
    perceptron,
    pixels,
    sentences,
    split_inside,
    wide,
)
from equal.networks import Painting, joint_loss, painted, step
from equal.optimizers import (
    adamw,
    adamw_with_lars,
    corrected,
    fused_adamw,
    fused_sgd,
    hooked,
    lamb,
    momentum,
    plain_sgd,
    rows_and_rest,
    sgd,
    sgdw,
)
from equal.runs import (
    Placement,
    Run,
    by_halves,
    custom_loop,
    from_a_list,
    grouped,
    halves_of_two_optimizers,
    module,
    nonfinite,
    resumed,
    standard,
    summed,
    trained,
)

ONE_DEVICE = (Placement(1, 1),)
ONE_RANK = (*ONE_DEVICE, Placement(1, 2))
TWO_RANKS = Placement(2, 1)
USUAL = (*ONE_RANK, TWO_RANKS)
EVERYWHERE = (*USUAL, Placement(1, 3), Placement(2, 2), Placement(3, 1))
SEVERAL_RANKS = (TWO_RANKS, Placement(3, 1))


@dataclass(frozen=True)
class Recipe:
    """A run, and the placements to run it at."""

    run: Run
    placements: tuple[Placement, ...] = USUAL


# Scales that overflow in the first updates, and fit after a few reductions.
TOO_HIGH: Mapping[str, tuple[torch.dtype, ls.LossScale]] = {
    "bf16-true": (
        torch.bfloat16,
        ls.DynamicLossScale(2.0**125, backoff=2.0**-18, maximum=2.0**126, interval=3),
    ),
    "fp16-true": (torch.float16, ls.DynamicLossScale(2.0**22, backoff=2.0**-5, interval=3)),
}


def _overflows() -> dict[str, Recipe]:
    """Return recipes whose gradients overflow at first, for each value of ``on_overflow``."""
    found = {}
    for rule in ("retry", "next", "skip"):
        scale = ls.DynamicLossScale(2.0**21, backoff=0.25, interval=2)
        found[f"overflow in fp32, {rule}"] = Recipe(
            trained(perceptron, loss_fn=overflowing, loss_scale=scale, on_overflow=rule)
        )
        for precision, (dtype, high) in TOO_HIGH.items():
            found[f"overflow in {precision}, {rule}"] = Recipe(
                trained(
                    half(perceptron, dtype),
                    fused_sgd,
                    precision=precision,
                    loss_fn=large_gradients,
                    loss_scale=high,
                    on_overflow=rule,
                )
            )
    return found


def _fp16(**options: Any) -> dict[str, Any]:
    """Return options of an updater in fp16 with dynamic loss scaling."""
    return {"precision": "fp16", "loss_scale": ls.DynamicLossScale(2.0**10, interval=3), **options}


RECIPES: Mapping[str, Recipe] = {
    # models, formats and optimizers
    "perceptron, sgd": Recipe(trained(perceptron), EVERYWHERE),
    "perceptron, adamw, bf16": Recipe(trained(perceptron, adamw, precision="bf16")),
    "perceptron, fused adamw, fp16": Recipe(trained(perceptron, fused_adamw, **_fp16())),
    "perceptron, corrected momentum, schedules": Recipe(trained(perceptron, corrected, schedule=True)),
    "perceptron, momentum, schedules": Recipe(trained(perceptron, momentum, schedule=True)),
    "perceptron, lamb": Recipe(trained(perceptron, lamb)),
    "perceptron, sgdw": Recipe(trained(perceptron, sgdw)),
    "perceptron, hooks": Recipe(trained(perceptron, hooked)),
    "perceptron, adamw with lars": Recipe(trained(perceptron, adamw_with_lars)),
    "images, sgd": Recipe(trained(images, data=pixels), EVERYWHERE),
    "images, adamw, bf16": Recipe(trained(images, adamw, data=pixels, precision="bf16"), EVERYWHERE),
    "images, corrected momentum, fp16": Recipe(trained(images, corrected, data=pixels, **_fp16())),
    "images, first buffers": Recipe(trained(images, data=pixels, buffers="first"), EVERYWHERE),
    "images, bf16-true": Recipe(
        trained(half(images, torch.bfloat16), corrected, data=pixels, loss_fn=in_float32, precision="bf16-true")
    ),
    "images, fp16-true, adamw": Recipe(
        trained(
            half(images, torch.float16),
            adamw,
            data=pixels,
            loss_fn=in_float32,
            **_fp16(precision="fp16-true"),
        )
    ),
    "reader, adamw": Recipe(trained(Reader, adamw, data=sentences), EVERYWHERE),
    "reader, lamb, bf16": Recipe(trained(Reader, lamb, data=sentences, precision="bf16")),
    "reader, tokens as weights": Recipe(trained(Reader, adamw, data=sentences, loss_fn=weighted_by_tokens)),
    "recurrent": Recipe(trained(Recurrent, adamw)),
    "recomputed in backward": Recipe(trained(Recomputed, sgd)),
    "noisy": Recipe(trained(Noisy, sgd), EVERYWHERE),
    "lazy": Recipe(trained(lazy, adamw, num_shards=3)),
    "sparse rows": Recipe(trained(BagOfWords, plain_sgd, data=sentences)),
    "sparse rows and the rest": Recipe(trained(BagOfWords, rows_and_rest, data=sentences), EVERYWHERE),
    "a model with its own loss, dicts": Recipe(trained(OwnLoss, adamw, data=dicts, loss_fn=None)),
    "fixed parameters and a hook of a tensor": Recipe(trained(frozen_stem, corrected)),
    "wide": Recipe(trained(wide, updates=4), EVERYWHERE),
    "wide, one shard per device": Recipe(trained(wide, fused_sgd, num_shards=None, updates=9), EVERYWHERE),
    "wide, one shard per device, batches of one size": Recipe(
        trained(wide, fused_sgd, num_shards=None, last_batch="wrap", updates=9), EVERYWHERE
    ),
    "wide, batches of one size": Recipe(trained(wide, last_batch="wrap", updates=14)),
    "wide, bf16, eight shards": Recipe(trained(wide, adamw, num_shards=8, precision="bf16", updates=4)),
    # options of an update
    "one shard": Recipe(trained(images, data=pixels, num_shards=1)),
    "eight shards": Recipe(trained(images, adamw, data=pixels, num_shards=8), EVERYWHERE),
    "one shard per device": Recipe(trained(images, data=pixels, num_shards=None), EVERYWHERE),
    "strided": Recipe(trained(Reader, adamw, data=sentences, split="strided"), EVERYWHERE),
    "accumulated": Recipe(trained(images, data=pixels, accumulate=2, num_shards=3), EVERYWHERE),
    "summed and not divided": Recipe(trained(perceptron, reduction="sum")),
    "uneven devices": Recipe(trained(images, data=pixels, uneven=True, num_shards=7), EVERYWHERE),
    "weights on the device": Recipe(trained(perceptron, loss_fn=weighted_on_device)),
    "weightless shards": Recipe(trained(perceptron, loss_fn=partly_weightless, num_shards=6)),
    "layers reached in some shards": Recipe(trained(perceptron, adamw, loss_fn=partly_reached)),
    "a watched first device": Recipe(trained(images, data=pixels, timeout=120.0)),
    "resumed": Recipe(resumed),
    "batches of a list": Recipe(from_a_list, ONE_RANK),
    "standard": Recipe(standard, ONE_DEVICE),
    "a custom loop": Recipe(custom_loop, ONE_DEVICE),
    # overflows
    **_overflows(),
    "spoiled losses, skipped on the device": Recipe(
        trained(perceptron, fused_adamw, loss_fn=spoiled, loss_scale=64.0, on_overflow="skip")
    ),
    "spoiled losses, skipped on the device, buffers": Recipe(
        trained(
            lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(7), perceptron()),
            fused_sgd,
            loss_fn=spoiled,
            loss_scale=ls.RampLossScale(8.0, interval=2),
            num_shards=3,
            on_overflow="skip",
        )
    ),
    "spoiled losses, next": Recipe(
        trained(perceptron, loss_fn=spoiled, on_overflow="next", loss_scale=ls.DynamicLossScale(interval=2))
    ),
    "spoiled losses, attempts exhausted": Recipe(
        trained(perceptron, loss_fn=spoiled, max_tries=3, loss_scale=ls.DynamicLossScale(2.0**9, interval=1))
    ),
    "overflow, accumulated": Recipe(
        trained(
            perceptron,
            loss_fn=overflowing,
            loss_scale=ls.DynamicLossScale(2.0**24, interval=2),
            accumulate=2,
            num_shards=3,
        )
    ),
    "shards that are not finite": Recipe(nonfinite),
    # custom steps
    "two networks, a step function": Recipe(painted(step_fn=step), EVERYWHERE),
    "two networks, a step function, bf16": Recipe(
        painted(step_fn=step, precision="bf16", loss_scale=ls.DynamicLossScale(interval=3))
    ),
    "two networks, a step function, skipped on the device": Recipe(
        painted(step_fn=step, fused=True, on_overflow="skip", loss_scale=32.0)
    ),
    "two networks, a method": Recipe(painted(Painting), EVERYWHERE),
    "two networks, one loss": Recipe(painted(loss_fn=joint_loss)),
    "two networks, one loss, fp16, accumulated": Recipe(
        painted(loss_fn=joint_loss, accumulate=2, num_shards=2, **_fp16())
    ),
    "by halves": Recipe(by_halves, EVERYWHERE),
    "by halves, two optimizers": Recipe(halves_of_two_optimizers),
    # groups and modules
    "group": Recipe(grouped(perceptron, (7,)), ONE_RANK),
    "group, buffers, uneven": Recipe(grouped(images, (1, 4, 7), uneven=True), ONE_RANK),
    "group, four shards, gradients added": Recipe(
        grouped(images, (1, 4, 7), num_shards=4, grad_mode="add", input_grads=True, buffers="first"), ONE_RANK
    ),
    "group, a model with its own loss": Recipe(grouped(OwnLoss, (7,), one_loss=True, num_shards=3), ONE_RANK),
    "group, wide": Recipe(grouped(wide, (7,), num_shards=6, fixed=["0.bias"]), ONE_RANK),
    "module": Recipe(module(), ONE_RANK),
    "module, flat, one backward": Recipe(module(flatten_parameters=True, parallel_backward=False), ONE_RANK),
    "module, first buffers": Recipe(module(buffers="first", workloads=None), ONE_RANK),
    "module within replicas": Recipe(trained(split_inside, adamw)),
    # communicators
    "sums over ranks": Recipe(summed, SEVERAL_RANKS),
    "sums rounded on their way": Recipe(trained(wide, compression="bf16", updates=4), SEVERAL_RANKS),
}
