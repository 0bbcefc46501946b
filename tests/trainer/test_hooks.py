"""The hooks of extensions are checked when they are added, and an extension that fails can be replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import OrderError
from lockstep.trainer import Extension, Trainer, make_extension
from tests.support.plain_updaters import CountingUpdater


def trainer_for(out: Path) -> Trainer:
    return Trainer(CountingUpdater(), (4, "iteration"), out)


class Hooked(Extension):
    """Has a hook whose signature or name is the parameter of a test."""

    def __call__(self, trainer: Any) -> None: ...


@pytest.mark.parametrize(
    ("name", "hook", "message"),
    [
        (
            "finalize",
            lambda _: None,
            r"`finalize` must take the trainer, .* Write it as def finalize\(self, trainer\)",
        ),
        ("initialize", lambda _, __, ___: None, "missing a required argument"),
        ("on_error", lambda _, __: None, r"the trainer and the error, .*def on_error\(self, trainer, error\)"),
        ("__call__", lambda _: None, "`__call__` must take the trainer"),
        ("collect", None, "is not a callable object"),
    ],
)
def test_hooks_that_cannot_be_called_are_refused_at_once(tmp_path: Path, name: str, hook: Any, message: str) -> None:
    extension = type("Hooked", (Hooked,), {name: hook})()
    with pytest.raises(TypeError, match=message):
        trainer_for(tmp_path).extend(extension)
    assert trainer_for(tmp_path).extensions == {}


def test_a_function_that_cannot_be_called_as_a_hook_is_refused_at_once(tmp_path: Path) -> None:
    extension = make_extension(finalize=lambda: None)(print)
    with pytest.raises(TypeError, match="`finalize` must take the trainer, got one of print"):
        trainer_for(tmp_path).extend(extension)


def test_methods_that_no_trainer_calls_are_warned_of(tmp_path: Path) -> None:
    extension = type("Hooked", (Hooked,), {"on_epoch_end": print, "on_train_begin": print, "on_error": print})()
    with pytest.warns(
        UserWarning, match="No trainer calls on_epoch_end, on_train_begin of Hooked. It calls .*on_error"
    ):
        trainer_for(tmp_path).extend(extension)


def test_an_extension_that_fails_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    calls = []

    def note(trainer: Trainer) -> None:
        calls.append(trainer.updater.iteration)
        if len(calls) == 1:
            raise RuntimeError("boom")

    trainer = trainer_for(tmp_path)
    trainer.extend(note, trigger=(2, "iteration"))
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run()
    trainer.remove("note")
    assert trainer.extensions == {}
    trainer.extend(note)
    trainer.extend(lambda trainer: trainer.remove("note"), name="removing", trigger=(4, "iteration"))
    with pytest.raises(OrderError, match="`remove` must not be called during a run"):
        trainer.run()
    assert calls == [2, 3, 4]
    with pytest.raises(KeyError, match="must be one of"):
        trainer.remove("nothing")


def test_the_extension_of_a_function_shows_what_it_was_added_with(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path)
    trainer.extend(lambda _: None, name="five", trigger=(5, "epoch"), priority=7)
    assert (
        repr(trainer.get_extension("five")) == "<FunctionExtension: default trigger (5, 'epoch'), default priority 7>"
    )
