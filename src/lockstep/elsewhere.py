"""What arguments and methods of other libraries are called here, for errors that say what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.util import find_spec
from inspect import Parameter, signature
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_PLACES: Final = 'Pass devices=["cuda:0", "cuda:1"], devices=2 or devices="auto" to the updater.'
_PROCESSES: Final = "Start several processes by `lockstep run -n 2 train.py` or torchrun; the script stays as it is."
_EVALUATE: Final = "Add an evaluation: trainer.extend(lockstep.extensions.Evaluator(batches, metrics))."
_SCHEDULER: Final = (
    "Pass scheduler= to step after every update; to step after every epoch, add an extension: "
    "trainer.extend(lockstep.extensions.StepScheduler(scheduler))."
)
_COMMUNICATOR: Final = (
    "Pass it to the communicator: communicator=lockstep.find_communicator(check_every=10, differing_models='refuse')."
)
_GRAD_SCALER: Final = "Pass loss_scale=lockstep.DynamicLossScale(2.0**16) to the updater."

BATCH_ITERATOR: Final = {
    "batch_size": "For tensors of all samples, pass torch.utils.data.TensorDataset(features, labels) as dataset.",
    "drop_last": 'Pass last_batch="drop".',
    "sampler": "Pass shuffle=True, or order_sampler=, a function of an order and the position in it; or give the "
    "updater a torch DataLoader with that sampler.",
    "batch_sampler": "Give the updater a torch DataLoader with it instead of a BatchIterator.",
    "collate_fn": "Pass converter= to the updater, a function of (samples, device); or give the updater a DataLoader.",
    "generator": "Pass seed=, an integer.",
    "pin_memory": "Leave it out: batches of worker processes are copied to devices in advance, see `copy_ahead`.",
    "persistent_workers": "Leave it out: worker processes stay until the run ends.",
    "prefetch_factor": "Leave it out: each worker loads two batches in advance.",
    "worker_init_fn": "Leave it out: each sample has a random stream of its own.",
}
"""What to write for arguments of `torch.utils.data.DataLoader`."""

UPDATER: Final = {
    "device": 'Pass devices=["cuda:0"], for example; one device or several.',
    "device_ids": _PLACES,
    "models": "Pass one model, which is copied to every device; or several networks by name, model={...}.",
    **dict.fromkeys(["criterion", "loss", "loss_func"], "Pass loss_fn=lockstep.supervised(criterion)."),
    **dict.fromkeys(["lr_scheduler", "epoch_scheduler"], _SCHEDULER),
    **dict.fromkeys(["check_every", "differing_models"], _COMMUNICATOR),
    "batch_size": "Pass it to the BatchIterator: it is the size of the whole batch.",
    "collate_fn": "Pass converter=, a function of (samples, device).",
    **dict.fromkeys(["accumulate_grad_batches", "gradient_accumulation_steps"], "Pass accumulate=."),
    "accumulation_steps": "Pass accumulate=.",
    **dict.fromkeys(["scaler", "grad_scaler"], _GRAD_SCALER),
    **dict.fromkeys(["gradient_clip_val", "max_grad_norm"], "Pass clip_grad_norm=1.0."),
    "accelerator": 'Pass devices=["cuda:0", "cuda:1"], devices=2 or devices="auto".',
    **dict.fromkeys(["strategy", "world_size"], _PROCESSES),
    "mixed_precision": 'Pass precision="bf16", or precision="fp16" with loss_scale=DynamicLossScale(2.0**16).',
    "find_unused_parameters": "Leave it out: parameters without a gradient are found in every update.",
}
"""What to write for arguments of DistributedDataParallel, Accelerate and Lightning."""

STANDARD_UPDATER: Final = UPDATER | {
    "device": 'Pass device="cpu", for example.',
    "devices": "Pass device=, of which there is one, or use ParallelUpdater.",
    "workloads": "Use ParallelUpdater for several devices.",
}

TRAINER: Final = {
    **dict.fromkeys(["max_epochs", "epochs", "num_epochs", "num_train_epochs"], 'Pass until=(10, "epoch").'),
    **dict.fromkeys(["max_steps", "num_steps"], 'Pass until=(1000, "iteration"), for example.'),
    "callbacks": "Pass extensions=, or call trainer.extend(extension, trigger=...).",
    "logger": "Call trainer.extend(lockstep.extensions.LogReport()), or TensorBoardLogger and others there.",
    **dict.fromkeys(["gradient_clip_val", "max_grad_norm"], "Pass clip_grad_norm=1.0 to the updater."),
    "accumulate_grad_batches": "Pass accumulate= to the updater.",
    **dict.fromkeys(["accelerator", "devices"], _PLACES),
    **dict.fromkeys(["num_nodes", "strategy"], _PROCESSES),
    "precision": 'Pass precision="bf16" or "fp16" to the updater.',
    **dict.fromkeys(["default_root_dir", "output_dir"], "Pass out=, the folder for files."),
    "stop_trigger": "Pass until=.",
    "val_check_interval": 'Pass trigger=(100, "iteration") where you extend the trainer by an Evaluator.',
    "check_val_every_n_epoch": 'Pass trigger=(2, "epoch") where you extend the trainer by an Evaluator.',
    "eval_dataset": _EVALUATE,
    "train_dataset": "Give the updater lockstep.BatchIterator(dataset, batch_size, shuffle=True).",
    "model": "Give the model to the updater, and the updater to the Trainer.",
    "optimizer": "Give the optimizer to the updater, and the updater to the Trainer.",
    "resume": 'Pass it to run: trainer.run(resume="auto").',
    "resume_from_checkpoint": 'Call trainer.run(resume="auto").',
    "enable_progress_bar": "Call trainer.extend(lockstep.extensions.ProgressBar()).",
    "deterministic": "Leave it out: results do not depend on devices. See lockstep.use_deterministic_kernels for GPUs.",
    "num_sanity_val_steps": "Pass call_before_training=True where you extend the trainer by an Evaluator.",
    "limit_train_batches": 'Pass fast_dev_run=, or a smaller `until`, such as (100, "iteration").',
    "limit_val_batches": "Pass num_batches= to the Evaluator.",
}
"""What to write for arguments of the trainers of Lightning, Hugging Face and Chainer."""

EXTEND: Final = {
    **dict.fromkeys(["every", "interval"], 'Pass trigger=(1, "epoch"), for example.'),
    "invoke_before_training": "Pass call_before_training=True.",
}
"""What to write for arguments of `Trainer.extend` elsewhere."""

RUN: Final = {
    **dict.fromkeys(["epochs", "max_epochs"], 'Pass until=(10, "epoch") to the Trainer, for example.'),
    "until": "Pass it to the Trainer, or set trainer.until.",
    **dict.fromkeys(["ckpt_path", "resume_from_checkpoint"], 'Pass resume="auto", or resume= with a folder.'),
}
"""What to write for arguments of the calls that train elsewhere."""

EVALUATOR: Final = {
    "dataset": "Pass lockstep.BatchIterator(dataset, batch_size, repeat=False) as the first argument.",
    "dataloader": "Pass it as the first argument.",
    "eval_func": "Pass loss_fn=.",
    "trigger": "Pass it to trainer.extend(evaluator, trigger=...).",
    "limit_val_batches": "Pass num_batches=.",
    "compute_metrics": 'Pass metrics={"accuracy": lockstep.metrics.Accuracy()}, of lockstep, torchmetrics or your own.',
}

SNAPSHOT: Final = {
    **dict.fromkeys(
        ["save_top_k", "save_total_limit"],
        "Pass keep=, the number of snapshots to keep, and best=, the name of a value, to keep the best one.",
    ),
    "monitor": "Pass best=, the name of an observed value.",
    "dirpath": "Pass out= to the Trainer; snapshots are in its folder.",
    "filename": "Leave it out: a snapshot is a folder named for its update. `lockstep export` writes one file.",
    "every_n_epochs": 'Pass trigger=(1, "epoch") to trainer.extend.',
    "every_n_train_steps": 'Pass trigger=(100, "iteration") to trainer.extend.',
}

DATA_PARALLEL: Final = {"device_ids": 'Pass devices=["cuda:0", "cuda:1"], for example.'}

TRAINER_NAMES: Final = {
    **dict.fromkeys(["fit", "train"], 'Call trainer.run(), or trainer.run(resume="auto").'),
    **dict.fromkeys(["validate", "evaluate", "test"], _EVALUATE),
    "add_callback": "Call trainer.extend(extension).",
    "callbacks": "Call trainer.extend(extension), and trainer.get_extension(name).",
    "save_checkpoint": "Snapshots are an extension: trainer.extend(lockstep.extensions.Snapshot()).",
    "save_model": "Call torch.save(model.state_dict(), path), or model.save_pretrained(path) of transformers.",
    **dict.fromkeys(["should_stop", "stop_training", "should_training_stop"], "Call trainer.stop()."),
    **dict.fromkeys(["remove_callback", "pop_callback"], "Call trainer.remove(name)."),
    "log": "Call trainer.observe(name, value).",
    "model": 'Read trainer.updater.get_all_models()["main"].',
    "optimizer": 'Call trainer.updater.get_optimizer("main").',
    "global_step": "Read trainer.updater.iteration.",
    "current_epoch": "Read trainer.updater.epoch.",
    "max_epochs": 'Set trainer.until = (10, "epoch"), for example.',
    "max_steps": 'Set trainer.until = (1000, "iteration"), for example.',
    "is_global_zero": "Read trainer.is_main.",
}
"""What to write for attributes and methods of other trainers."""

GIVEN_ONCE: Final = (
    "Pass it to the constructor, which reads it once. For another value in mid-run, create another updater, and load "
    "the state of this one into it: other.load_state_dict(updater.state_dict())."
)
"""What to write for an option of an updater that is read or set as an attribute."""

UPDATER_NAMES: Final = {
    **dict.fromkeys(["fit", "train", "run"], "Call update() for one update, or run() of a lockstep.Trainer."),
    **dict.fromkeys(["step", "backward", "zero_grad"], "update() runs all three; leave this call out."),
    "eval": "Call lockstep.predict(updater, batches), or use lockstep.extensions.Evaluator.",
    "parameters": 'Call updater.get_all_models()["main"].parameters(); they are those of your model.',
    **dict.fromkeys(["model", "module"], 'Read updater.get_all_models()["main"], which is your model.'),
    "optimizer": 'Call updater.get_optimizer("main"), which returns your optimizer.',
    "iterator": 'Call updater.get_iterator("main").',
    "scheduler": "Pass scheduler= to the constructor, and keep your scheduler to read it; the updater steps it.",
    "lr": 'Set it in the optimizer: updater.get_optimizer("main").param_groups[0]["lr"].',
    "momentum": 'Set it in the optimizer: updater.get_optimizer("main").param_groups[0]["momentum"].',
    "weight_decay": 'Set it in the optimizer: updater.get_optimizer("main").param_groups[0]["weight_decay"].',
    "batch_size": "Give the BatchIterator another batch_size.",
    "num_shards": "Pass it to the constructor; a result depends on it.",
    "accumulate": "Pass it to the constructor, also as a function of the epoch.",
    "param_groups": 'Read updater.get_optimizer("main").param_groups.',
}
"""What to write for attributes and methods of models, optimizers and other loops."""

MODULE_NAMES: Final = {
    **dict.fromkeys(["DistributedDataParallel", "DDP", "Accelerator"], "Use lockstep.ParallelUpdater or DataParallel."),
    "GradScaler": f"{_GRAD_SCALER} In a loop without one, use lockstep.LossScaler.",
    "DataLoader": "Use lockstep.BatchIterator, or give the updater a torch.utils.data.DataLoader.",
    "ModelCheckpoint": "Use lockstep.extensions.Snapshot.",
    "Callback": "Derive from lockstep.Extension, or pass a function of the trainer to trainer.extend.",
    "EarlyStopping": 'Pass until=lockstep.triggers.EarlyStopping("validation/main/loss") to the Trainer.',
    "EMA": "Use lockstep.extensions.ExponentialMovingAverage.",
    "save": "Call lockstep.snapshots.save(updater, path), or use lockstep.extensions.Snapshot.",
    "load": 'Call lockstep.snapshots.restore(updater, path), or trainer.run(resume="auto").',
    "set_seed": "Use lockstep.seed_everything.",
    "barrier": "Call updater.communicator.barrier().",
    "all_reduce": "Call updater.communicator.all_reduce(tensors).",
    "get_rank": "Read trainer.is_main, or updater.communicator.rank.",
    "LearningRateMonitor": "Use lockstep.extensions.ObserveLR.",
}
"""What to write for classes and functions of other libraries."""


def names_ours(ours: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function, or a dataclass, whose errors about its arguments say what to write.

    Args:
        ours: What to write for arguments of other libraries, as sentences by name; "*" stands for others that do not
            fit.

    >>> @names_ours({"bs": "Pass batch_size=."})
    ... def load(path, *, batch_size=1): ...
    >>> load("data", bs=2)
    Traceback (most recent call last):
    TypeError: load() has no argument `bs`. Pass batch_size=.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]  # the constructor that Python wrote
            return function

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError:
                try:
                    signature(function).bind(*args, **kwargs)
                except TypeError as unbound:
                    # Without the traceback from inside: the mistake is in the call.
                    raise TypeError(_unbound(function, unbound, kwargs, ours)) from None
                raise

        return checked

    return decorate


def _unbound(
    function: Callable[..., object], error: TypeError, kwargs: Mapping[str, object], ours: Mapping[str, str]
) -> str:
    """Return what is wrong with the arguments of a call, and what to write."""
    called = function.__qualname__.removesuffix(".__init__")
    parameters = [each for each in signature(function).parameters.values() if each.name != "self"]
    taken = {each.name for each in parameters}
    unknown = [name for name in kwargs if name not in taken]
    if unknown and unknown[0] in ours:
        return f"{called}() has no argument `{unknown[0]}`. {ours[unknown[0]]}"
    twice = [remedy for name, remedy in ours.items() if f"multiple values for argument {name!r}" in str(error)]
    if twice:
        return f"{called}() got {error}. {twice[0]}"
    placed = [each.name for each in parameters if each.kind is not Parameter.KEYWORD_ONLY]
    named = [f"{each.name}=" for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
    rule = f"It takes ({', '.join(placed)}) by position" + (f", and by name {', '.join(named)}." if named else ".")
    what = f"has no argument `{unknown[0]}`" if unknown else f"got arguments that do not fit: {error}"
    return f"{called}() {what}. {rule} {ours.get('*', '')}".rstrip()


def missing_attribute(of: object, name: str, ours: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that an object lacks, which says what to write.

    Args:
        of: The object, or a module.
        name: The name of the attribute.
        ours: What to write for attributes of other libraries, as sentences by name.
    """
    what = f"Module {of.__name__!r}" if isinstance(of, ModuleType) else f"{type(of).__name__!r} object"
    remedy = f" {ours[name]}" if name in ours else ""
    # With name and object, from which Python looks for a similar name.
    return AttributeError(f"{what} has no attribute {name!r}.{remedy}", name=name, obj=of)


def missing_name(module: ModuleType, name: str, parts: Sequence[ModuleType]) -> AttributeError:
    """Return the error for a name that a module lacks, which says where it is.

    Args:
        module: The module.
        name: The name.
        parts: The modules in which to look for it.
    """
    found = [part for part in parts if name in vars(part)]
    ours = MODULE_NAMES | ({name: f"It is {found[0].__name__}.{name}."} if found else {})
    return missing_attribute(module, name, ours)


class KnowsOthers:
    """Says what an attribute of another library is called here, where it is read or set."""

    _others: ClassVar[Mapping[str, str]]

    if not TYPE_CHECKING:  # checkers of types know which attributes there are

        def __getattr__(self, name: str) -> object:
            """Raise an error that says what an attribute of another library is called here."""
            raise missing_attribute(self, name, self._others)

        def __setattr__(self, name: str, value: object) -> None:
            """Set an attribute, unless nothing of lockstep reads it and it is an option elsewhere or of constructors.

            Raises:
                AttributeError: If it is such an option; a subclass of yours may have it.
            """
            unread = name in self._others and not hasattr(type(self), name)
            if unread and type(self).__module__.startswith("lockstep."):
                raise missing_attribute(self, name, self._others)
            super().__setattr__(name, value)


def check_installed(package: str, *, extra: str, user: str) -> None:
    """Check that a package is installed, without importing it.

    Args:
        package: The name of the package.
        extra: The extra of lockstep that installs it.
        user: The name of the class or function that requires it.

    Raises:
        ImportError: If the package is not installed.
    """
    if find_spec(package) is None:
        raise ImportError(f"{user} requires {package}. Install it: pip install 'lockstep-torch[{extra}]'.")
