"""What people write by mistake, and what they are told: the cause and the cure, and never nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy as ce
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils import data as torch_data

import lockstep
from lockstep.compat.nnabla import DynamicLossScalingUpdater
from tests.support.mistakes import (
    DATA,
    DICTS,
    Ragged,
    StepByClosure,
    StepByLoss,
    Stream,
    Texts,
    WithoutTargets,
    X,
    Y,
    adam,
    batches,
    best_of,
    build,
    configured_by_lightning,
    evaluate,
    ext,
    file_for_a_folder,
    loss_of_batch,
    loss_of_outer_model,
    loss_that_changes_options,
    loss_that_scales,
    loss_that_steps,
    loss_with_backward,
    ls,
    met,
    moved_by_hand,
    net,
    normalized,
    own_backward,
    own_optimizer_step,
    own_scheduler_step,
    own_step_after_compute_gradients,
    replaced_layer,
    report_of_two_arguments,
    resumed,
    run,
    same_extension_twice,
    set_on,
    sgd,
    snapshots_twice,
    step_by,
    table,
    train,
    trainer,
    trig,
    twice,
    two_ways_to_step,
)

hooks = ls.optim.hooks


class Collator:
    """A collator like those of transformers, whose second argument is no device."""

    def __call__(self, features: Any, return_tensors: str = "pt") -> Any:
        if return_tensors != "pt":
            raise ValueError(f"Framework '{return_tensors}' not recognized!")
        return torch.tensor([0]) if isinstance(features, list) else features.keys()


WAVES = [(wave, index % 2) for index, wave in enumerate(torch.zeros(12, 16))]
FLOATS = torch_data.TensorDataset(X, Y.float())
Row = tuple[str, Callable[[], object], tuple[str, ...]]


def row(name: str, mistake: Callable[[], object], *words: str) -> Row:
    """A mistake, and words of what is said about it: the cause first, then the cure."""
    return name, mistake, words


NOT_CALLED_SO = (
    "`loss_fn` must take the model first and then each entry of the batch",
    "The batch is (Tensor, Tensor)",
)
PAIRS = ("A batch must hold inputs and a target", "Give a dataset of pairs (input, target)")
ORDER = "The order is (iterator, optimizer, model)."
COLUMNS = "torch.utils.data.TensorDataset("

LOSSES = [
    row("backward", lambda: train(loss_fn=loss_with_backward), "must not call `backward`", "return the loss"),
    row("one batch", lambda: train(loss_fn=loss_of_batch), *NOT_CALLED_SO, "Write loss_fn(model, *batch)"),
    row("batch first", lambda: train(loss_fn=lambda x, y, model: ce(model(x), y)), *NOT_CALLED_SO),
    row("no target", lambda: train(loss_fn=lambda model, x: model(x).sum()), *NOT_CALLED_SO),
    row("no model", lambda: train(loss_fn=lambda x, y: x.sum() + y.sum()), *NOT_CALLED_SO),
    row("criterion", lambda: train(loss_fn=ce), "got a criterion", "Pass lockstep.supervised(cross_entropy)"),
    row("module", lambda: train(loss_fn=nn.MSELoss()), "got a criterion", "Pass lockstep.supervised(MSELoss(...))"),
    row("class", lambda: train(loss_fn=nn.MSELoss), "got the class MSELoss", "Pass lockstep.supervised(MSELoss())"),
    row("class inside", lambda: ls.supervised(nn.MSELoss), "got the class MSELoss", "Pass supervised(MSELoss())"),
    row("not called", lambda: train(loss_fn=ls.supervised), "got supervised itself", "Pass supervised(criterion)"),
    row("not called either", lambda: train(loss_fn=ls.token_mean), "got token_mean itself", "Pass token_mean()"),
    row("none", lambda: train(loss_fn=None), "Without `loss_fn`", "Pass loss_fn=lockstep.supervised(criterion)"),
    row("unreduced", lambda: ls.supervised(nn.MSELoss(reduction="none")), "reduction='none'", "Use reduction='mean'"),
    row("vector", lambda: train(loss_fn=lambda m, x, y: ce(m(x), y, reduction="none")), "shape (3,)", "Take its mean"),
    row("item", lambda: train(loss_fn=lambda m, x, y: ce(m(x), y).item()), "got a float", "return lockstep.Loss"),
    row("no return", lambda: train(loss_fn=lambda *_: None), "got a NoneType", "Return the loss"),
    row(
        "column",
        lambda: train(model=nn.Linear(4, 1), iterator=batches(FLOATS), loss_fn=ls.supervised(nn.MSELoss())),
        "as many dimensions, got (3, 1) and (3,)",
        "output.squeeze(-1)",
    ),
    row("tuple", lambda: train(loss_fn=lambda m, x, y: (ce(m(x), y), 1)), "got a tuple", "return lockstep.Loss"),
    row(
        "logits and loss",
        lambda: train(loss_fn=lambda m, x, y: (m(x), ce(m(x), y))),
        "got a tuple. If entry [1] is the loss, pass lambda model, *batch: model(*batch)[1]",
    ),
    row("dict", lambda: train(loss_fn=lambda m, x, y: {"loss": ce(m(x), y)}), "got a dict", "Return its entry 'loss'"),
    row("report", report_of_two_arguments, "got another float", "pass a dict: report({name: value})"),
    row("outer model", loss_of_outer_model, "must compute its loss with the model that it is given"),
    row(
        "rate inside",
        lambda: loss_that_changes_options(scheduled=False),
        "'lr' of group 0 of optimizer 'main' changed from 0.1 to 0.17715610000000007",
        "Change it between updates",
    ),
    row(
        "scheduler inside",
        lambda: loss_that_changes_options(scheduled=True),
        "'last_epoch' of StepLR changed from 0 to 6",
        "or pass the scheduler as `scheduler`",
    ),
    row(
        "GradScaler",
        lambda: train(loss_fn=loss_that_scales(torch.amp.GradScaler("cpu"))),
        "refers to an enabled GradScaler",
        "Leave it out, and pass loss_scale=lockstep.DynamicLossScale(2.0**16)",
    ),
    row("step inside", loss_that_steps, "SGD.step() is called although update() steps", "Leave the call out"),
    row(
        "metric without weight",
        lambda: train(loss_fn=lambda m, x, y: ls.Loss(ce(m(x), y), metrics={"accuracy": 0.5})),
        "`metrics['accuracy']` of a Loss must be a pair (sum, weight)",
        "such as (correct, count)",
    ),
    row(
        "metrics as weight", lambda: train(loss_fn=lambda m, x, y: ls.Loss(ce(m(x), y), {})), "got a dict", "metrics={"
    ),
    row("weight", lambda: train(loss_fn=lambda m, x, y: ls.Loss(ce(m(x), y), weight=-1)), "finite and at least 0"),
    row("label 6", lambda: train(iterator=batches(torch_data.TensorDataset(X, Y + 5))), "Target 5 is out of bounds"),
    row("width", lambda: train(model=nn.Linear(5, 2)), "shapes cannot be multiplied (3x4 and 5x2)", "shard 0"),
    row(
        "other keys",
        lambda: train(iterator=batches(DICTS), loss_fn=lambda model, inputs, labels: ce(model(inputs), labels)),
        "as loss_fn(model, x=..., y=...)",
        "unexpected keyword argument 'x'",
    ),
    row(
        "two inputs",
        lambda: train(iterator=batches(torch_data.TensorDataset(X, X, Y))),
        "called with the entries of the batch but the target, (Tensor, Tensor)",
        "Pass a function loss_fn(model, *batch)",
    ),
]

ONE_ARGUMENT = "cannot be called with two arguments"
SAMPLES = [
    row(
        "collate_fn=list",
        lambda: train(iterator=torch_data.DataLoader(WAVES, 6, collate_fn=list), loss_fn=lambda *_: None),
        "got a list of 6 tuples, which look like single samples",
        "lockstep.IterableBatches(source, batches_of='samples')",
    ),
    row(
        "list of dicts",
        lambda: train(iterator=[[{"x": x, "y": 1} for x in X]] * 2, loss_fn=lambda *_: None),
        "got a list of 12 dicts, which look like single samples",
    ),
    row("no targets", lambda: train(iterator=batches(WithoutTargets())), *PAIRS),
    row("a tensor", lambda: train(iterator=batches(X)), *PAIRS),
    row("one tensor", lambda: train(iterator=batches(torch_data.TensorDataset(X))), *PAIRS),
    row("two tensors", lambda: ls.BatchIterator(X, Y, batch_size=6), "multiple values", COLUMNS),
    row("tuple of tensors", lambda: batches((X, Y)), "tuple of 2 tensors with 12 rows each", COLUMNS),
    row("list of tensors", lambda: batches([X, Y]), "list of 2 tensors with 12 rows each", COLUMNS),
    row("dict of tensors", lambda: batches({"x": X, "y": Y}), "keys ['x', 'y']", "list with one dict per sample"),
    row("loader", lambda: batches(torch_data.DataLoader(DATA)), "got a DataLoader", "Give the updater the DataLoader"),
    row(
        "stream",
        lambda: batches(Stream()),
        "got a Stream",
        "a StreamPart of each of its shards, or give the updater a DataLoader of it",
    ),
    row("generator", lambda: batches(each for each in DATA), "got a generator", "Pass a list of samples"),
    row("class", lambda: batches(torch_data.TensorDataset), "got the class TensorDataset", "Create one"),
    row("None", lambda: batches(None), "got a NoneType", "Pass a list of samples"),
    row("dataset", lambda: train(iterator=DATA), "got a TensorDataset", "`BatchIterator` makes batches of a dataset"),
    row("tensor", lambda: train(iterator=X), "got a Tensor", "`BatchIterator` makes batches of a dataset"),
    row("size 6.0", lambda: batches(batch_size=6.0), "`batch_size` must be an integer, got 6.0"),
    row(
        "no size", lambda: ls.BatchIterator(DATA), "missing a required argument: 'batch_size'", "(dataset, batch_size)"
    ),
    row("size 64", lambda: batches(batch_size=64), "`batch_size` is 64, but there are only 12 samples"),
    row("shuffle", lambda: batches(shuffle="yes"), "`shuffle` must be True or False, got 'yes'"),
    row("repeat", lambda: batches(repeat="no"), "`repeat` must be True or False, got 'no'"),
    row("by position", lambda: ls.BatchIterator(DATA, 6, True), "too many positional", "by name shuffle="),
    row("seed", lambda: batches(seed=0.5), "`seed` must be an integer, got 0.5"),
    row("last batch", lambda: batches(last_batch="keep"), "`last_batch` must be 'wrap', 'short' or 'drop'"),
    row("drop_last", lambda: batches(drop_last=True), "no argument `drop_last`", 'Pass last_batch="drop"'),
    row("sampler", lambda: batches(sampler=[1]), "no argument `sampler`", "Pass shuffle=True, or order_sampler="),
    row("batch_sampler", lambda: batches(batch_sampler=[1]), "no argument `batch_sampler`", "torch DataLoader"),
    row("collate_fn", lambda: batches(collate_fn=list), "no argument `collate_fn`", "Pass converter= to the updater"),
    row("pin_memory", lambda: batches(pin_memory=True), "no argument `pin_memory`", "Leave it out"),
    row("generator=", lambda: batches(generator=1), "no argument `generator`", "Pass seed=, an integer"),
    row("unknown", lambda: batches(colour=1), "no argument `colour`", "by name shuffle="),
    row(
        "RandomSampler", lambda: batches(order_sampler=torch_data.RandomSampler(DATA)), "RandomSampler", "shuffle=True"
    ),
    row(
        "DistributedSampler",
        lambda: batches(order_sampler=torch_data.DistributedSampler(DATA, 2, 0)),
        "got a DistributedSampler",
        "lockstep shares each batch among ranks itself",
    ),
    row(
        "WeightedRandomSampler",
        lambda: batches(order_sampler=torch_data.WeightedRandomSampler([1.0] * 12, 12)),
        "got a WeightedRandomSampler",
        "Pass lambda order, position:",
    ),
    row("list of indices", lambda: batches(order_sampler=[1, 2]), "got a list", "Pass lambda order, position:"),
    row("one argument", lambda: batches(order_sampler=lambda order: order), ONE_ARGUMENT, "too many positional"),
    row(
        "short order", lambda: batches(order_sampler=lambda order, _: order[:5]), "one index for each of the 12 samples"
    ),
    row(
        "DistributedSampler in a loader",
        lambda: train(iterator=torch_data.DataLoader(DATA, 6, sampler=torch_data.DistributedSampler(DATA, 2, 0))),
        "which gives each rank samples of its own",
        "leave out the DistributedSampler",
    ),
    row(
        "ragged",
        lambda: train(iterator=batches(Ragged())),
        "`samples[1][0]` must have the shape (1,)",
        "collate, padding=0)",
    ),
    row("texts", lambda: train(iterator=batches(Texts())), "got a str", "pass your own `converter`"),
    row(
        "default_collate",
        lambda: train(converter=torch_data.default_collate),
        "must be called as converter(samples, device), got default_collate",
        "Pass lambda samples, device: collator(list(samples)).to(device)",
    ),
    row(
        "collator of transformers",
        lambda: train(converter=Collator()),
        "must be called as converter(samples, device), got Collator",
        "Pass lambda samples, device: collator(list(samples)).to(device)",
    ),
    row(
        "collator without list",
        lambda: train(converter=lambda samples, device: Collator()(samples).to(device)),
        "'Samples' object has no attribute 'keys'",
        "Pass list(samples) where a list is expected",
    ),
    row(
        "converter without return",
        lambda: train(converter=lambda *_: None),
        "`converter` must return the tensors of the samples",
        "got None",
    ),
    row(
        "converter that drops samples",
        lambda: train(converter=lambda samples, device: ls.collate(list(samples)[:1], device)),
        "`converter` must keep all samples, got a target of shape (1,) for the 3 samples of a shard",
        "leave samples out of the dataset",
    ),
    row(
        "repeat=False", lambda: run(iterator=batches(repeat=False)), "The iterator ended after 1 epochs", "repeat=True"
    ),
]

ONE_OF = "must be one of 'fp32', 'bf16', 'fp16'"
UPDATERS = [
    row("gpu", lambda: build(devices=["gpu"]), "such as 'cpu' or 'cuda:0', got 'gpu'"),
    row("devices=0", lambda: build(devices=0), "`devices` must be at least 1, got 0"),
    row("devices=2.0", lambda: build(devices=2.0), "`devices` must be names, a number or 'auto', got a float"),
    row("device=", lambda: build(device="cpu"), "no argument `device`", 'Pass devices=["cuda:0"]'),
    row("device_ids=", lambda: build(device_ids=[0]), "no argument `device_ids`", "devices=2"),
    row("num_shards=2.0", lambda: build(num_shards=2.0), "`num_shards` must be an integer, got 2.0"),
    row("idle", lambda: build(devices=["cpu"] * 3), "`num_shards` is 2, but there are 3 devices", "Use fewer devices"),
    row(
        "empty", lambda: build(num_shards=16), "`num_shards` is 16, but a batch has only 6 samples", "Use fewer shards"
    ),
    row("unset", lambda: build(devices=2, num_shards=None), "`num_shards` is not given", "Give num_shards"),
    row("model class", lambda: build(model=nn.Linear, optimizer=sgd(net())), "got the class Linear", "Linear(...)"),
    row("DataParallel", lambda: build(model=nn.DataParallel(net())), "spread over devices", "`model.module`"),
    row("optimizer class", lambda: build(optimizer=SGD), "got the class SGD", "Create one: SGD(...)"),
    row(
        "configure_optimizers",
        lambda: build(model=(model := net()), optimizer=configured_by_lightning(model)),
        "`optimizer['lr_scheduler']` must be a torch.optim.Optimizer, got a dict",
        'pass configured["optimizer"] here',
        'StepScheduler(configured["lr_scheduler"]["scheduler"])',
    ),
    row(
        "other model",
        lambda: build(optimizer=sgd(net())),
        "must hold parameters of `model` only",
        "create the optimizer",
    ),
    row("swapped", lambda: ls.ParallelUpdater(batches(), net(), sgd(net())), "got a Linear", ORDER),
    row("model first", lambda: ls.ParallelUpdater(net(), sgd(net()), batches()), "got a BatchIterator", ORDER),
    row("scheduler", lambda: build(optimizer=StepLR(sgd(net()), 1)), "got a StepLR", "the scheduler as `scheduler`"),
    row("scheduler class", lambda: build(scheduler=StepLR), "got the class StepLR", "Create one: StepLR(...)"),
    row("other scheduler", lambda: build(scheduler=StepLR(sgd(net()), 1)), "is another object", "Create the scheduler"),
    row("step(loss)", lambda: step_by(StepByLoss), "whose step requires 'loss'", "Define step(self, closure)"),
    row("own step", own_optimizer_step, "SGD.step() is called although update() steps", "Leave the call out"),
    row("own step after compute", own_step_after_compute_gradients, "is not counted", "Call apply_gradients() instead"),
    row(
        "moved by hand", lambda: moved_by_hand(applies=False), "batch statistics, is lost", "call apply_gradients() for"
    ),
    row("replaced layer", replaced_layer, "belongs to it any more, and not '1.weight'", "create both again"),
    row("numpy", lambda: build(num_shards=np.int64(4)), "must be an integer, got np.int64(4)", "Pass int(4)"),
    row("stream", lambda: build(iterator=Stream()), "whose items are taken for batches", "Pass DataLoader(dataset"),
    row("own scheduler", own_scheduler_step, "(`scheduler`)", "Leave out your call"),
    row("scheduled twice", two_ways_to_step, "so that it steps twice", "or the StepScheduler"),
    row("own backward", own_backward, "got one that no optimizer has used", "optimizer.zero_grad()"),
    row("16-mixed", lambda: build(precision="16-mixed"), ONE_OF, "'fp16', with loss_scale=DynamicLossScale(2.0**16)"),
    row("bf16-mixed", lambda: build(precision="bf16-mixed"), ONE_OF, "Pass precision='bf16'"),
    row("dtype", lambda: build(precision=torch.bfloat16), ONE_OF, "Pass precision='bf16'"),
    row("float16", lambda: build(precision="float16"), ONE_OF, "Pass precision='fp16'"),
    row("dynamic", lambda: build(loss_scale="dynamic"), "got a str. Pass lockstep.DynamicLossScale(2.0**16)"),
    row("scaler", lambda: build(loss_scale=torch.amp.GradScaler("cpu")), "got a GradScaler", "DynamicLossScale("),
    row("scaler=", lambda: build(scaler=None), "no argument `scaler`", "Pass loss_scale=lockstep.DynamicLossScale("),
    row(
        "ls.GradScaler", lambda: ls.GradScaler, "no attribute 'GradScaler'", "DynamicLossScale(", "lockstep.LossScaler"
    ),
    row("accumulation_steps", lambda: build(accumulation_steps=4), "no argument `acc", "Pass accumulate="),
    row(
        "scheduler text", lambda: build(scheduler="cosine"), "`scheduler` must be a torch", "got a str. Create one from"
    ),
    row("half", lambda: build(model=net().half()), "holds weights in torch.float16", "Pass precision='fp16-true'"),
    row(
        "two entries",
        lambda: build().compute_gradients(X, Y),
        "compute_gradients() got arguments that do not fit",
        "as one tuple or dict, as in compute_gradients((x, y))",
    ),
    row(
        "single sample",
        lambda: build().compute_gradients(DATA[0]),
        "must have a dimension 0 to count samples by",
        "If it is a single sample, lockstep.collate([sample]) makes a batch of it",
    ),
    row(
        "optimizer object",
        lambda: (updater := build()).compute_gradients((X, Y), optimizer=updater.get_optimizer("main")),
        "`optimizer` must be one of ['main'], got a SGD. Pass its name",
    ),
    row("clip_grad_norm=0", lambda: build(clip_grad_norm=0), "must be above 0, got 0", "Pass None"),
    *(
        row(f"{name}=", partial(build, **{name: 2}), f"no argument `{name}`", cure)
        for name, cure in {
            "accumulate_grad_batches": "Pass accumulate=.",
            "gradient_accumulation_steps": "Pass accumulate=.",
            "gradient_clip_val": "Pass clip_grad_norm=1.0.",
            "max_grad_norm": "Pass clip_grad_norm=1.0.",
            "criterion": "Pass loss_fn=lockstep.supervised(criterion).",
            "loss": "Pass loss_fn=lockstep.supervised(criterion).",
            "lr_scheduler": "Pass scheduler=",
            "epoch_scheduler": "StepScheduler",
            "check_every": "find_communicator(check_every=",
            "batch_size": "Pass it to the BatchIterator",
            "accelerator": "Pass devices=",
            "collate_fn": "Pass converter=",
            "models": "Pass one model",
            "find_unused_parameters": "Leave it out",
            "mixed_precision": 'Pass precision="bf16"',
            "world_size": "lockstep run -n 2",
            "colour": "by name devices=",
        }.items()
    ),
    row("StandardUpdater", lambda: build(ls.StandardUpdater), "no argument `devices`", "use ParallelUpdater"),
    row("seed", lambda: build(seed="0"), "`seed` must be an integer, got '0'"),
    row("workloads", lambda: build(devices=["cpu"] * 2, workloads=[1, 2, 3]), "one number per device (2), got 3"),
    row("reduction", lambda: build(reduction="avg"), "must be 'mean' or 'sum', got 'avg'"),
    row("eval", lambda: train(model=net().eval()), "was in evaluation mode", "Call model.train()"),
    row("frozen", lambda: train(model=net().requires_grad_(False)), "must have a parameter that requires a gradient"),
    row("SyncBatchNorm", lambda: train(model=nn.SyncBatchNorm(2), optimizer=sgd), "SyncBatchNorm", "Use BatchNorm"),
    row(
        "BatchNorm",
        lambda: train(model=normalized(), num_shards=6),
        "needs at least 2 values per channel in every shard, and this shard has 1",
        "Lower `num_shards`",
    ),
    row(
        "BatchNorm and the last batch",
        lambda: train(3, model=normalized(), iterator=batches(batch_size=5)),
        "if this is the last batch of an epoch",
        'leave it out by last_batch="drop"',
    ),
    row("NaN", lambda: train(iterator=batches(torch_data.TensorDataset(X / 0, Y))), "was skipped", "find_nonfinite()"),
    row("get_optimizer", lambda: build().get_optimizer("gen"), "must be one of ['main'], got 'gen'"),
    row("lr", lambda: set_on(build(), "lr", 0.1), "no attribute 'lr'", 'param_groups[0]["lr"]'),
    row("batch_size", lambda: set_on(build(), "batch_size", 3), "no attribute 'batch_size'", "Give the BatchIterator"),
    *(
        row(f".{name}", partial(getattr, build(), name), f"no attribute {name!r}", cure)
        for name, cure in {
            "zero_grad": "leave this call out",
            "step": "leave this call out",
            "backward": "leave this call out",
            "train": "Call update() for one update",
            "fit": "Call update() for one update",
            "eval": "lockstep.predict",
            "parameters": 'get_all_models()["main"].parameters()',
            "model": 'get_all_models()["main"]',
            "optimizer": 'get_optimizer("main")',
            "scheduler": "Pass scheduler= to the constructor",
        }.items()
    ),
]

UNIT = "must be 'iteration', 'update', 'epoch', 'sample' or 'second'"
EXTENSION = "`extension` must be an Extension or a function of the trainer"
TRAINERS = [
    row("file for a folder", file_for_a_folder, "`out` must be a folder, got 'x', which is a file"),
    row("model", lambda: ls.Trainer(net()), "got a Linear", "Create one: lockstep.ParallelUpdater"),
    row("nothing", ls.Trainer, "missing a required argument: 'updater'", "(updater, until, out, extensions)"),
    *(
        row(f"{name}=", partial(trainer, **{name: 2}), f"no argument `{name}`", cure)
        for name, cure in {
            "max_epochs": 'Pass until=(10, "epoch")',
            "epochs": 'Pass until=(10, "epoch")',
            "num_train_epochs": 'Pass until=(10, "epoch")',
            "max_steps": 'Pass until=(1000, "iteration")',
            "stop_trigger": "Pass until=",
            "callbacks": "Pass extensions=",
            "logger": "LogReport",
            "gradient_clip_val": "Pass clip_grad_norm=1.0 to the updater",
            "accumulate_grad_batches": "Pass accumulate= to the updater",
            "accelerator": "to the updater",
            "devices": "to the updater",
            "num_nodes": "torchrun",
            "strategy": "torchrun",
            "precision": 'Pass precision="bf16" or "fp16" to the updater',
            "val_check_interval": 'trigger=(100, "iteration")',
            "check_val_every_n_epoch": 'trigger=(2, "epoch")',
            "default_root_dir": "Pass out=",
            "output_dir": "Pass out=",
            "eval_dataset": "lockstep.extensions.Evaluator",
            "train_dataset": "lockstep.BatchIterator",
            "optimizer": "Give the optimizer to the updater",
            "resume": 'trainer.run(resume="auto")',
            "limit_train_batches": "Pass fast_dev_run=",
            "limit_val_batches": "Pass num_batches= to the Evaluator",
            "num_sanity_val_steps": "call_before_training=True",
            "enable_progress_bar": "lockstep.extensions.ProgressBar",
            "colour": "(updater, until, out, extensions)",
        }.items()
    ),
    *(
        row(f".{name}", partial(getattr, trainer(), name), f"no attribute {name!r}", cure)
        for name, cure in {
            "fit": "Call trainer.run()",
            "train": "Call trainer.run()",
            "validate": "lockstep.extensions.Evaluator",
            "test": "lockstep.extensions.Evaluator",
            "add_callback": "Call trainer.extend(extension)",
            "save_checkpoint": "lockstep.extensions.Snapshot",
            "save_model": "torch.save(model.state_dict(), path)",
            "should_stop": "trainer.stop()",
            "log": "trainer.observe(name, value)",
            "model": "trainer.updater.get_all_models()",
            "global_step": "trainer.updater.iteration",
        }.items()
    ),
    row("stop", lambda: set_on(trainer(), "should_stop", True), "no attribute 'should_stop'", "Call trainer.stop()"),
    row("set max_epochs", lambda: set_on(trainer(), "max_epochs", 3), "no attribute 'max_epochs'", "Set trainer.until"),
    row("until=10", lambda: trainer(until=10), 'a pair such as (10, "epoch")', "got 10"),
    row("epochs", lambda: trainer(until=(10, "epochs")), f"`until[1]` {UNIT}", "got 'epochs'. Did you mean 'epoch'?"),
    row("steps", lambda: trainer(until=(10, "step")), UNIT, "got 'step'"),
    row("swapped", lambda: trainer(until=("epoch", 10)), '(10, "epoch"), of a Python number and a unit, got ('),
    row("text", lambda: trainer(until="10 epochs"), 'a pair such as (10, "epoch")', "got '10 epochs'"),
    row("class", lambda: trainer(until=trig.EarlyStopping), "got the class EarlyStopping", "Create one"),
    row("fast_dev_run", lambda: trainer(fast_dev_run=-1), "`fast_dev_run` must be at least 0, got -1"),
    row("extend class", lambda: trainer().extend(ext.LogReport), EXTENSION, "Create one: LogReport()"),
    row("classes", lambda: trainer(extensions=[ext.LogReport]), EXTENSION, "Create one: LogReport()"),
    row("list", lambda: trainer().extend([ext.LogReport()]), EXTENSION, "Call extend for each"),
    row("name", lambda: trainer().extend("LogReport"), EXTENSION, "got 'LogReport'"),
    row("no parameter", lambda: trainer().extend(lambda: None), EXTENSION, "cannot be called with the trainer"),
    row("trigger", lambda: trainer().extend(trig.EarlyStopping()), EXTENSION, "Pass a trigger as `until`"),
    row("same twice", same_extension_twice, "must not be added twice, got LogReport", "Create another one"),
    row("two logs", lambda: run(ext.LogReport(), ext.LogReport()), "`filename` must be different", "Leave one out"),
    row("returned dict", lambda: run(lambda _: {"x": 1.0}), "returned values (x)", "Call trainer.observe(name, value)"),
    row("trigger text", lambda: trainer().extend(ext.LogReport(), trigger="epoch"), "a pair such as", "got 'epoch'"),
    row("trigger 5", lambda: trainer().extend(ext.LogReport(), trigger=5), "a pair such as", "got 5"),
    row(
        "trigger steps",
        lambda: trainer().extend(ext.LogReport(), trigger=(5, "steps")),
        f"`trigger[1]` {UNIT}",
        "got 'steps'",
    ),
    row("trigger 0", lambda: trainer().extend(ext.LogReport(), trigger=(0, "epoch")), "must be above 0"),
    row("by position", lambda: trainer().extend(ext.LogReport(), (1, "epoch")), "too many positional", "trigger="),
    row("every=", lambda: trainer().extend(ext.LogReport(), every=2), "no argument `every`", "Pass trigger="),
    row("get_extension", lambda: trainer().get_extension("Log"), "must be one of [], got 'Log'"),
    row("during a run", lambda: run(lambda trainer: trainer.run()), "must not be called during a run"),
    row("observe text", lambda: run(lambda trainer: trainer.observe("x", "y")), "a Mean, a number or a 0-d tensor"),
    row("observe vector", lambda: run(lambda trainer: trainer.observe("x", X)), "must have no dimension"),
    row("resume=True", lambda: run(resume=True), '`resume` must be "auto"', "got True"),
    row("resume path", lambda: run(resume="no/such"), "a snapshot or a run that has one, got no/such", 'Pass "auto"'),
    row(
        "resume without snapshots",
        lambda: run(resume="auto"),
        "x holds no snapshot, and no extension of this trainer writes any",
        "trainer.extend(lockstep.extensions.Snapshot())",
    ),
    row("run(epochs=)", lambda: trainer().run(epochs=3), "run() has no argument `epochs`", "to the Trainer"),
    row("run(ckpt_path=)", lambda: trainer().run(ckpt_path="x"), "no argument `ckpt_path`", 'Pass resume="auto"'),
    row("shards", lambda: resumed(num_shards=3), "num_shards is 3 here and 2", "accept=('num_shards',)"),
    row(
        "batch size", lambda: resumed(iterator=batches(batch_size=4)), "batch_size is 4 here", "accept=('batch_size',)"
    ),
    row("optimizer", lambda: resumed(optimizer=adam), "optimizer is 'Adam' here", "accept=('optimizer'"),
    row("wider", lambda: resumed(model=nn.Linear(4, 3)), "`accept` cannot help", "strict=False"),
    row(
        "accept weights",
        lambda: resumed(model=nn.Linear(4, 3), accept=("model.weight", "model.bias")),
        "`accept` cannot help, because the weights do not fit",
        "strict=False",
    ),
    row(
        "accept text",
        lambda: resumed(accept="num_shards", num_shards=3),
        "`accept` must be a collection of fields of the recipe, got 'num_shards'. Pass ('num_shards',).",
    ),
    row("accept other", lambda: resumed(accept=("foo",)), "got 'foo'. Fields: num_shards"),
    row(
        "accept several",
        lambda: resumed(accept=("optimizer.lr", "optimizer.initial_lr", "num_shard")),
        "got 'num_shard', 'optimizer.initial_lr'. Did you mean 'num_shards', 'optimizer.lr'? Fields: ",
    ),
    row("accept=True", lambda: resumed(accept=True), "`accept` must be a collection of fields", "got a bool. Pass ("),
    row("finished", lambda: twice(resume="auto"), "Nothing to train: the run in x is at update 2", "a later `until`"),
    row("not resumed", twice, "must not hold snapshots of a run that this one does not continue", "resume='auto'"),
]

EXTENSIONS = [
    row("snapshots twice", snapshots_twice, "is in use by process", "A trainer takes one Snapshot"),
    row(
        "columns in a text", lambda: table("epoch,main/loss"), "must be a list of names", "Pass ['epoch', 'main/loss']"
    ),
    row(
        "not added",
        lambda: ext.Evaluator(batches(repeat=False), {"a": met.Accuracy()})(trainer()),
        "Add it by trainer.extend(extension)",
    ),
    row("table without log", lambda: run(ext.PrintReport()), "must name a LogReport", "trainer.extend(LogReport())"),
    row("columns", lambda: table("epoch", "loss", "acc"), "got 'loss'", "Did you mean 'main/loss'", "got 'acc'"),
    row(
        "column of an evaluation",
        lambda: table("epoch", "validation/accuracy"),
        "Did you mean 'validation/main/accuracy'",
    ),
    row("text of columns", lambda: table("main/loss"), "got the text 'main/loss'", "Pass ['main/loss']"),
    row("bar", lambda: run(ext.ProgressBar(values=["loss"])), "`values` of ProgressBar", "Did you mean 'main/loss'"),
    row("text of bar", lambda: ext.ProgressBar(values="main/loss"), "got the text", "Pass ['main/loss']"),
    row("keys", lambda: run(ext.LogReport(["loss"])), "`keys` of LogReport", "Did you mean 'main/loss'"),
    row(
        "keys of a logger", lambda: run(ext.CSVLogger(keys=["loss"])), "`keys` of CSVLogger", "Did you mean 'main/loss'"
    ),
    row("text of keys", lambda: ext.LogReport("main/loss"), "got the text", "Pass ['main/loss']"),
    row("log by text", lambda: run(ext.LogReport(trigger="epoch")), 'a pair such as (10, "epoch")', "got 'epoch'"),
    row(
        "early stopping",
        lambda: run(until=trig.EarlyStopping("val_loss", max_trigger=(3, "epoch"))),
        "'val_loss' was not observed",
        "there is 'main/loss'",
        "Name one of these",
    ),
    row("MinValue", lambda: best_of("val/loss"), "got 'val/loss'; there is 'main/loss'"),
    row("best", lambda: run(ext.Snapshot(best="accuracy")), "`best` must be observed", "there is 'main/loss'"),
    row("save_top_k", lambda: ext.Snapshot(save_top_k=1), "no argument `save_top_k`", "Pass keep="),
    row("monitor", lambda: ext.Snapshot(monitor="loss"), "no argument `monitor`", "Pass best="),
    row("limit", lambda: ext.Snapshot(save_total_limit=2), "no argument `save_total_limit`", "Pass keep="),
    row("compute_metrics", lambda: ext.Evaluator([], compute_metrics=len), "`compute_metrics`", "Pass metrics={"),
    row(
        "evaluated dataset", lambda: evaluate(DATA), "got a TensorDataset", "BatchIterator(dataset, batch_size, repeat"
    ),
    row("evaluated tensors", lambda: evaluate((X, Y)), "got a tuple", "TensorDataset(*tensors)"),
    row("repeating", lambda: evaluate(batches()), "must end after one pass", "repeat=False"),
    row("evaluated model", lambda: ext.Evaluator(net(), batches(repeat=False)), "got a Linear", "Pass it by model="),
    row("metric", lambda: evaluate([(X, Y)], metrics=met.Accuracy()), "a dict of metrics by name, got a Accuracy"),
    row(
        "metric class", lambda: evaluate([(X, Y)], metrics={"a": met.Accuracy}), "must hold instances", "class Accuracy"
    ),
    *(
        row(
            f"{metric} as a metric",
            partial(evaluate, [(X, Y)], metrics={"a": metric}),
            "must have update, compute and reset",
            "lockstep.metrics.Accuracy(), or call lockstep.report({name: value})",
        )
        for metric in (max, "accuracy")
    ),
    row("criterion", lambda: evaluate([(X, Y)], loss_fn=ce), "got a criterion", "lockstep.supervised(cross_entropy)"),
    row("labels", lambda: evaluate([(X,)]), "got 1 tensor", "give a dataset of pairs (input, target)"),
    row("regression", lambda: evaluate([(X, X)]), "with at least 2 classes", "Pass `threshold="),
    row("num_batches", lambda: evaluate([(X, Y)], num_batches=0), "`num_batches` must be at least 1, got 0"),
]

OTHERS = [
    row(
        "LBFGS as a solver",
        lambda: DynamicLossScalingUpdater(torch.optim.LBFGS(net().parameters()), lambda: torch.zeros(())),
        "`solver` must have a step without arguments, got LBFGS",
        "Pass it to a ParallelUpdater",
    ),
    row("digest of a path", lambda: ls.digest("runs/x"), "got 'runs/x'", "lockstep snapshots PATH"),
    row("digest of a Path", lambda: ls.digest(Path("runs")), "Path('runs')", "lockstep snapshots PATH"),
    row("digest of a class", lambda: ls.digest(nn.Linear), "got the class Linear", "Pass the object"),
    row("launch", lambda: ls.launch("main", num_processes=2), "`main` must be a function, got a str"),
    row("no process", lambda: ls.launch(print, num_processes=0), "`num_processes` must be at least 1, got 0"),
    row("predict", lambda: ls.predict(net(), (X, Y)), "got a tuple", "TensorDataset(*tensors)"),
    row(
        "predict and repeat",
        lambda: ls.predict(net(), batches()),
        "must end after one pass",
        "Create it with repeat=False",
    ),
    row("seed", lambda: ls.seed_everything("a"), "`seed` must be an integer, got 'a'"),
    row("find_lr", lambda: ls.find_lr(net()), "`updater` must be a ParallelUpdater, got a Linear"),
    row("model as parameters", lambda: ls.MomentumSGD(net(), lr=0.1), "got a Linear", "Pass model.parameters()"),
    row("lr", lambda: ls.MomentumSGD(net().parameters(), lr=-1), "`lr` must be finite and at least 0, got -1"),
    row(
        "hook class",
        lambda: ls.MomentumSGD(net().parameters(), lr=0.1).add_hook(hooks.WeightDecay),
        "got the class WeightDecay",
        "Create one",
    ),
    row("backward first", lambda: ls.ReplicaGroup(net(), devices=["cpu"]).backward(), "A forward must come first"),
    row("device_ids", lambda: ls.DataParallel(net(), device_ids=[0]), "no argument `device_ids`", "Pass devices="),
    row("ls.Evaluator", lambda: ls.Evaluator, "It is lockstep.extensions.Evaluator"),
    row("ls.Accuracy", lambda: ls.Accuracy, "It is lockstep.metrics.Accuracy"),
    row("ls.EarlyStopping", lambda: ls.EarlyStopping, "It is lockstep.triggers.EarlyStopping"),
    row("ls.DDP", lambda: ls.DDP, "no attribute 'DDP'", "lockstep.ParallelUpdater"),
    *(
        row(f"ls.{name}", partial(getattr, ls, name), f"no attribute {name!r}", cure)
        for name, cure in {
            "save": "lockstep.snapshots.save(updater, path)",
            "load": "lockstep.snapshots.restore(updater, path)",
            "set_seed": "lockstep.seed_everything",
            "barrier": "updater.communicator.barrier()",
            "all_reduce": "updater.communicator.all_reduce(tensors)",
            "get_rank": "updater.communicator.rank",
        }.items()
    ),
    row("ls.DataLoader", lambda: ls.DataLoader, "no attribute 'DataLoader'", "Use lockstep.BatchIterator"),
    row("ModelCheckpoint", lambda: ext.ModelCheckpoint, "no attribute", "Use lockstep.extensions.Snapshot"),
    row("EMA", lambda: ext.EMA, "no attribute", "Use lockstep.extensions.ExponentialMovingAverage"),
    row("extensions.EarlyStopping", lambda: ext.EarlyStopping, "It is lockstep.triggers.EarlyStopping"),
]

NUMBER, SWITCH, LIST = "must be a number, got", "must be True or False, got", "must be a list of names, got"
MODULE, OPTIMIZER = "`model` must be a torch.nn.Module, got a", "`optimizer` must be one of ['main'], got"
GROUP, PREDICT = partial(ls.ReplicaGroup, net(), ["cpu"]), partial(ls.predict, net(), DATA, devices=["cpu"])
ARGUMENTS = [
    row(
        f"{name} of {kind.__name__} as text",
        partial(kind, *given, **{name: "0.1"}),
        f"`{name}` {NUMBER}",
        "float('0.1')",
    )
    for kind, given, names in (
        (ls.MomentumSGD, [[*net().parameters()]], ("lr", "momentum", "weight_decay", "dampening")),
        (ls.CorrectedMomentumSGD, [[*net().parameters()]], ("lr", "momentum", "weight_decay")),
        (hooks.WeightDecay, [], ("rate",)),
        (hooks.GradientNoise, [], ("eta",)),
        (hooks.GradientClipping, [], ("threshold",)),
        (hooks.GradientLARS, [], ("threshold", "weight_decay", "eps")),
        (ext.ExponentialMovingAverage, [net()], ("decay",)),
        (ls.DynamicLossScale, [], ("growth",)),
        (trig.EarlyStopping, [], ("min_delta", "stop_at", "diverge_at")),
    )
    for name in names
]
ARGUMENTS += [
    row(
        f"{name} of {kind.__name__} as a switch", partial(kind, *given, **{name: "false"}), f"`{name}` {SWITCH} 'false'"
    )
    for kind, given, names in (
        (ls.MomentumSGD, [[*net().parameters()]], ("nesterov", "maximize", "correction", "frozen")),
        (ls.ReplicaGroup, [net(), ["cpu"]], ("training", "device_grads")),
        (ls.DataParallel, [net(), ["cpu"]], ("flatten_parameters", "use_nccl", "parallel_backward")),
        (ext.ExponentialMovingAverage, [net()], ("use_buffers",)),
        (ls.Carried, [X], ("each_epoch",)),
        (ext.LogReport, [], ("required",)),
        (ext.CSVLogger, [], ("required",)),
    )
    for name in names
]
ARGUMENTS += [
    row(
        f"{name} of {kind.__name__} as one text",
        partial(kind, **{name: "lr"}),
        f"`{name}` {LIST} the text",
        "Pass ['lr']",
    )
    for kind in (ext.LogReport, ext.CSVLogger)
    for name in ("last", "sums")
]
ARGUMENTS += [
    row(f"workloads={given!r} of {of}", partial(kind, workloads=given), words)
    for given, words in ((2, "`workloads` must be a list"), (["a"], f"`workloads[0]` {NUMBER} 'a'"))
    for kind, of in ((build, "an updater"), (GROUP, "a group"), (partial(ls.DataParallel, net(), ["cpu"]), "a module"))
]
ARGUMENTS += [
    row("decay as True", lambda: hooks.WeightDecay(True), f"`rate` {NUMBER} True"),
    row("lr=None", lambda: ls.MomentumSGD(net().parameters(), lr=None), f"`lr` {NUMBER} None"),
    row("seed as text", lambda: ls.seed_everything("8"), "must be an integer, got '8'. Pass int('8')"),
    row("seed of noise", lambda: hooks.GradientNoise(0.1, seed=0.5), "`seed` must be an integer, got 0.5"),
    *(
        row(f"{name} of find_lr", lambda name=name: ls.find_lr(build(), **{name: "1"}), f"`{name}` {NUMBER} '1'")
        for name in ("min_lr", "max_lr", "stop_factor")
    ),
    *(
        row(f"optimizer={given!r} of find_lr", lambda given=given: ls.find_lr(build(), optimizer=given), OPTIMIZER)
        for given in ("sgd", ["main"])
    ),
    row("optimizer of gradients", lambda: build().compute_gradients((X, Y), optimizer=["main"]), OPTIMIZER),
    row("optimizer of a step", lambda: build().apply_gradients("sgd"), OPTIMIZER),
    row(
        "buffers_of",
        lambda: build().compute_gradients((X, Y), buffers_of=["gen"]),
        "`buffers_of` must be one of ['main'], got 'gen'",
    ),
    row("model_name", lambda: trainer().predict(DATA, model_name="gen"), "`model_name` must be one of ['main']"),
    row("list as precision", lambda: build(precision=["bf16"]), ONE_OF, "got ['bf16']"),
    row("auto_new_epoch", lambda: build(auto_new_epoch="no"), f"`auto_new_epoch` {SWITCH} 'no'"),
    row("position in dim", lambda: ls.DataParallel(net(), ["cpu"], dim={1: 2}), "`dim` must be", "got {1: 2}"),
    row("worker_init_fn", lambda: ls.DataParallel(net(), ["cpu"], worker_init_fn=0), "must be a function of", "got 0"),
    row("shared_group", lambda: GROUP(shared_group=net()), "must be a ReplicaGroup or None, got a Linear"),
    row("fixed", lambda: GROUP(fixed=0), f"`fixed` {LIST} 0"),
    row("input_grads", lambda: GROUP(input_grads="write"), "`input_grads` must be True, False or a dict", "got a str"),
    row(
        "one extension",
        lambda: trainer(extensions=ext.LogReport()),
        "`extensions` must be a list",
        "Put it into a list",
    ),
    row("average of a path", lambda: ext.ExponentialMovingAverage("x.pt"), f"{MODULE} str"),
    row("summary of nothing", lambda: ls.summarize_model(None), f"{MODULE} NoneType"),
    row("prediction of a state", lambda: ls.predict(net().state_dict(), DATA), f"{MODULE} OrderedDict"),
    row("prediction for nothing", lambda: ls.predict(net(), None), "`dataset` must be a dataset", "got a NoneType"),
    row("output", lambda: PREDICT(output="logits"), "`output` must be a function of", "got 'logits'"),
    row("target", lambda: PREDICT(target=1), "`target` must be True, False", "got a int"),
    row("no converter", lambda: PREDICT(converter=None), "`converter` must be callable, got a NoneType"),
    row(
        "communicator", lambda: PREDICT(communicator="gloo"), "`communicator` must be a Communicator or None, got a str"
    ),
    row("output_dim", lambda: PREDICT(output_dim="x"), "`output_dim` must be an integer", "got 'x'"),
    row(
        "list as metrics of a Loss",
        lambda: train(loss_fn=lambda model, x, y: ls.Loss(ce(model(x), y), metrics=[("a", 1, 2)])),
        "`metrics` of a Loss must be a dict of pairs (sum, weight) by name",
        "{'accuracy': (correct, count)}",
    ),
    row("shifted", lambda: ls.token_mean(shifted="x"), "`shifted` must be True, False or None, got a str"),
    row(
        "weights of a Loss",
        lambda: train(loss_fn=lambda model, x, y: ls.Loss(ce(model(x), y), weight=torch.ones(3))),
        "`weight` of a Loss must have one element, got shape (3,)",
        "weight=weights.sum()",
    ),
    row(
        "average of another model",
        lambda: run(ext.ExponentialMovingAverage(nn.Linear(2, 2))),
        "differs in 'weight'",
        "Pass the model that is trained",
    ),
    row("targets for a batch size", lambda: ls.BatchIterator(X, Y), "`batch_size` must be an integer", "(12,)"),
    row("snapshot of a model", lambda: ls.snapshots.save(net(), "x"), "`updater` must be an updater, got a Linear"),
    row("model to restore", lambda: ls.snapshots.restore(net(), "x"), "`updater` must be an updater, got a Linear"),
    row("snapshot at a number", lambda: ls.snapshots.save(build(), 3.0), "`path` must be a path, got a float"),
    row("restore nothing", lambda: ls.snapshots.restore(build(), None), "`path` must be a path, got a NoneType"),
    row("a criterion of two", lambda: ls.BatchLoss(net(), ce), "`criterion` must take", "one tuple or dict"),
]

MISTAKES = {
    f"{part}: {name}": (mistake, words)
    for part, rows in {
        "loss": LOSSES,
        "data": SAMPLES,
        "updater": UPDATERS,
        "trainer": TRAINERS,
        "extension": EXTENSIONS,
        "other": OTHERS,
        "argument": ARGUMENTS,
    }.items()
    for name, mistake, words in rows
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_cure(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake, words = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    said = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            mistake()
        except Exception as error:  # noqa: BLE001 - of any class
            said.append(str(error))
    said += [str(each.message) for each in warned]
    said.append(capsys.readouterr().err)
    for each in words:
        assert each in "\n".join(said)
    # What is said once, and not in every update.
    assert len({str(each.message) for each in warned}) == len(warned)


def test_every_mistake_is_another_one() -> None:
    assert len(MISTAKES) == sum(map(len, (LOSSES, SAMPLES, UPDATERS, TRAINERS, EXTENSIONS, OTHERS, ARGUMENTS)))
    assert all(words for _, words in MISTAKES.values())


@pytest.mark.parametrize(
    "right",
    [
        lambda: run(lambda trainer: trainer.updater.get_all_models()["main"].zero_grad()),
        lambda: table("epoch", "main/loss", "validation/main/accuracy"),
        lambda: run(ext.ProgressBar(values=["main/loss"]), ext.LogReport(["main/loss"])),
        lambda: batches([X[0], X[1], X[2]], batch_size=3),
        lambda: batches(X),
        lambda: train(3, devices=["cpu", "cpu"]),
        lambda: train(3, num_shards=6),
        lambda: moved_by_hand(applies=True),
        lambda: moved_by_hand(applies=False, moves=False),
        lambda: step_by(StepByClosure),
        lambda: step_by(StepByLoss, step_fn=lambda *_: None),
        lambda: train(loss_fn=loss_that_scales(torch.amp.GradScaler("cpu", enabled=False))),
        lambda: ls.digest(["text"]),
    ],
)
def test_what_is_right_is_not_commented_on(
    right: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right()


def test_a_gradient_of_ones_own_may_be_stepped_by() -> None:
    model = net()
    optimizer = sgd(model)
    updater = build(model=model, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            updater.update()
            optimizer.zero_grad()
            ce(model(X), Y).backward()
            optimizer.step()


@pytest.mark.parametrize("option", list(signature(lockstep.ParallelUpdater).parameters))
def test_an_option_that_is_set_after_the_construction_is_refused(option: str) -> None:
    with pytest.raises(AttributeError, match=option):
        setattr(build(), option, None)


def test_an_updater_goes_on_with_another_option_in_another_updater() -> None:
    model = net()
    first = build(model=model)
    first.update()
    second = build(model=model, optimizer=first.get_optimizer("main"), loss_fn=lambda net, x, y: 2 * ce(net(x), y))
    second.load_state_dict(first.state_dict())
    second.update()
    assert second.iteration == 2
    first.finalize()
    second.finalize()


def test_options_of_ones_own_subclass_may_have_any_name() -> None:
    class Mine(lockstep.ParallelUpdater):
        lr = 0.1

    class MyTrainer(lockstep.Trainer):
        pass

    updater = build(Mine)
    updater.batch_size = 3
    mine = MyTrainer(updater)
    mine.max_epochs = 3  # type: ignore[attr-defined]
    assert (updater.lr, updater.batch_size, mine.max_epochs) == (0.1, 3, 3)  # type: ignore[attr-defined]
