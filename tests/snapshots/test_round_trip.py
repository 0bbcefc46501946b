"""What is saved is what is read, and the files are those that other programs expect."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st

import lockstep as ls
from lockstep.digest import TensorDigest, tensor_digest
from lockstep.snapshots import Content, load, training_of, verify
from lockstep.snapshots.content import without_sources
from lockstep.snapshots.tensor_file import DTYPES, TensorInfo, file_order, header
from lockstep.snapshots.tree import decode, encode
from lockstep.updaters.state.recipe_fields import settings_of
from tests.support.snapshots import RUN, assert_holds, small_content, write

PLAIN = st.none() | st.booleans() | st.integers(-(2**1000), 2**1000) | st.floats() | st.text()
TREES = st.recursive(
    PLAIN,
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["$", "$tuple"]), parts, max_size=3)
        | st.dictionaries(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False), parts, max_size=3)
    ),
    max_leaves=12,
)


def described(value: Any) -> Any:
    """Return a value that is equal only for the same types and bits."""
    if isinstance(value, dict):
        return (type(value).__name__, [(described(key), described(part)) for key, part in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [described(part) for part in value])
    return (type(value).__name__, repr(value))


def through_json(tree: Any) -> Any:
    return decode(json.loads(json.dumps(encode(tree, ("tree",), []))), str, depth=200)


@given(TREES)
def test_trees_of_plain_values_are_read_as_they_were(tree: Any) -> None:
    assert described(through_json(tree)) == described(tree)


def test_what_optimizers_and_schedulers_keep_is_read_as_it_was() -> None:
    tree = {"milestones": Counter({30: 1}), "betas": (0.9, 0.999), "worst": -float("inf"), "state": {0: {"n": -0.0}}}
    assert described(through_json(tree)) == described(tree)
    assert described(through_json(OrderedDict(a=1))) == described({"a": 1})


def optimizers() -> list[type[torch.optim.Optimizer]]:
    found = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    other = {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    return [each for each in found if issubclass(each, torch.optim.Optimizer) and each not in other]


@pytest.mark.parametrize("kind", optimizers())
def test_torch_optimizers_go_on_from_a_snapshot(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    def run(updates: int, saved: Any = None, start: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = kind(model.parameters() if kind.__name__ != "Muon" else [model.weight])  # type: ignore[call-arg]
        if saved is not None:
            model.load_state_dict(saved.model())
            optimizer.load_state_dict(saved.state()["optimizer"])
        for update in range(start, updates):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(update))).square().mean().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = run(3)
    content = Content(
        progress={"update": 3},
        run_id=RUN,
        models={"main": dict(model.state_dict(keep_vars=True))},
        state={"optimizer": optimizer.state_dict()},
    )
    [folder] = write(tmp_path, content)
    assert ls.digest(*run(6, load(folder), 3)) == ls.digest(*run(6))


def test_every_dtype_is_read_as_it_was_and_files_are_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {}
    for index, name in enumerate(DTYPES):
        dtype = getattr(torch, name)
        tensors[f"{9 - index % 3}{name}"] = torch.arange(12).to(dtype).reshape(3, 4)
        tensors[f"scalar {name} ä\u2028\x7f\t"] = torch.ones((), dtype=dtype)
        tensors[f"empty {name}"] = torch.empty((0, 3), dtype=dtype)
    [folder] = write(tmp_path, Content(progress={"update": 0}, run_id=RUN, models={"main": tensors}, state=[1]))
    assert (folder / "model.safetensors").read_bytes() == safetensors.torch.save(tensors, metadata={"format": "pt"})
    read = load(folder).model()
    assert list(read) == file_order({n: TensorInfo.of(t) for n, t in tensors.items()})
    assert {n: (t.dtype, t.shape, tensor_digest(t)) for n, t in read.items()} == {
        n: (t.dtype, t.shape, tensor_digest(t)) for n, t in tensors.items()
    }
    assert safetensors.torch.load_file(folder / "state.safetensors") == {}


def test_the_header_is_the_same_for_any_order() -> None:
    infos = {"a": TensorInfo("float32", (2,)), "b": TensorInfo("int64", (1,)), "c": TensorInfo("float32", (3,))}
    assert header(infos) == header(dict(reversed(infos.items())))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.out = torch.nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight


def test_a_bare_module_with_tied_weights_loads_the_file(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    models = {"main": dict(model.state_dict(keep_vars=True))}
    [folder] = write(tmp_path, Content(progress={"update": 1}, run_id=RUN, models=models))
    assert safetensors.torch.load_model(other, folder / "model.safetensors") == (set(), [])
    assert ls.digest(other) == ls.digest(model)
    assert json.loads(verify(folder).raw)["models"]["main"] == {"out.weight": "embed.weight"}
    other = Tied()
    other.load_state_dict(load(folder).model())
    assert ls.digest(other) == ls.digest(model)


def test_from_pretrained_reads_the_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=4)
    model = transformers.GPT2LMHeadModel(config)
    models = {"main": dict(model.state_dict(keep_vars=True))}
    [folder] = write(tmp_path, Content(progress={"update": 1}, run_id=RUN, models=models))
    config.save_pretrained(folder)
    assert ls.digest(transformers.GPT2LMHeadModel.from_pretrained(folder)) == ls.digest(model)


def test_digests_are_those_of_the_live_state(tmp_path: Path) -> None:
    content = small_content()
    [folder] = write(tmp_path, content)
    snapshot = load(folder)
    assert_holds(snapshot, content)
    expected = {"training": snapshot.digest, "surroundings": content.surroundings}
    assert snapshot.manifest.run == ls.digest(expected)
    assert (snapshot.epoch, snapshot.manifest.reasons) == (0, ("test",))
    assert snapshot.recipe == content.recipe
    assert snapshot.manifest.metrics == content.metrics
    with pytest.raises(ls.SnapshotError, match=r"has the models \['main'\], got 'gen'"):
        snapshot.model("gen")


@pytest.mark.parametrize("name", ["main", "other"])
def test_digests_leave_out_the_state_of_a_loader_and_no_other_one(tmp_path: Path, name: str) -> None:
    """An iterator of a user may have a key of the same name, in which runs may differ."""

    def digests(recipe: dict[str, Any], source: int) -> tuple[str, str]:
        iterators = {name: {"position": 2, "source": source}, "user": {"source": 3}}
        content = small_content(recipe=recipe, state={"iterators": iterators})
        [folder] = write(tmp_path / f"{len(recipe)}{source}", content)
        assert ls.digest(training_of(content)) == verify(folder).training == load(folder).digest
        return load(folder).digest, load(folder).manifest.run

    field = "batches_of" if name == "main" else f"{name}.batches_of"
    assert digests({field: None}, 7) == digests({field: None}, 8)
    assert digests({}, 7)[0] != digests({}, 8)[0]


def test_a_recipe_has_a_field_for_each_loader_that_digests_leave_out() -> None:
    loaders = {"main": ls.IterableBatches([torch.zeros(8, 6)]), "other": ls.IterableBatches([torch.zeros(8, 6)])}
    batches = {**loaders, "user": ls.BatchIterator(torch.zeros(8, 6), 8)}
    parts = {"models": {}, "optimizers": {}, "schedulers": {}, "carried": None}
    recipe = settings_of(SimpleNamespace(loss_scale=ls.StaticLossScale(), iterators=batches, **parts))  # type: ignore[arg-type]
    kept = without_sources({"iterators": {each: {"source": 7} for each in batches}}, recipe)
    assert kept == {"iterators": {"main": {"source": None}, "other": {"source": None}, "user": {"source": 7}}}


def test_a_tensor_digest_stands_for_its_tensor() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    stand_in = TensorDigest("float32", (2, 3), tensor_digest(tensor))
    assert ls.digest({"a": [tensor]}) == ls.digest({"a": [stand_in]})


def test_the_manifest_has_the_fields_of_format_2(tmp_path: Path) -> None:
    [folder] = write(tmp_path, small_content())
    document = json.loads((folder / "snapshot.json").read_bytes())
    assert list(document) == [
        "format",
        "writer",
        "run_id",
        "parent",
        "reasons",
        "progress",
        "metrics",
        "recipe",
        "kernel_class",
        "state",
        "surroundings",
        "models",
        "files",
        "sha256",
    ]
    half = small_content().state["half"]
    assert document["files"]["state.safetensors"]["state/half"] == ["bfloat16", [5], [tensor_digest(half)]]
    assert document["state"]["masters"] == [{"$tensor": ["model.safetensors", "weight"]}]


class Lookahead(torch.optim.Optimizer):
    """Averages the weights of another optimizer, and saves both states under names of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step(closure)
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        slow, fast = super().state_dict(), self.inner.state_dict()
        return {"slow_state": slow["state"], "fast_state": fast["state"], "param_groups": fast["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        super().load_state_dict({"state": state_dict["slow_state"], "param_groups": groups})
        self.inner.load_state_dict({"state": state_dict["fast_state"], "param_groups": groups})
        self.param_groups = self.inner.param_groups


def looking_ahead(fails: list[int]) -> ls.ParallelUpdater:
    """Build an updater whose step function fails once after its step in some updates."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3)

    def step_fn(updater: ls.ParallelUpdater, batch: Any) -> None:
        updater.compute_gradients(batch)
        updater.apply_gradients()
        if updater.iteration in fails:
            fails.remove(updater.iteration)
            raise RuntimeError("after its step")

    return ls.ParallelUpdater(
        ls.BatchIterator(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), 4, seed=0),
        Lookahead(torch.optim.Adam(net.parameters(), lr=0.1)),
        net,
        devices=["cpu"],
        loss_fn=lambda net, x: net(x).square().mean(),
        step_fn=step_fn,
    )


def test_a_state_under_names_of_the_optimizers_own_is_loaded_by_it(tmp_path: Path) -> None:
    updater, resumed = looking_ahead([]), looking_ahead([4])
    for update in range(6):
        if update == 3:
            ls.snapshots.save(updater, tmp_path / "saved")
        updater.update()
    ls.snapshots.restore(resumed, tmp_path / "saved")
    resumed.update()
    with pytest.raises(RuntimeError, match="after its step"):
        resumed.update()
    for _ in range(2):
        resumed.update()
    assert ls.digest(resumed.get_all_models()["main"]) == ls.digest(updater.get_all_models()["main"])
