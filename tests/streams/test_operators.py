"""Every random operator of this torch that runs on a CPU draws from the thread's stream, with the same bits.

The operators are those that torch itself tags as random. A new torch that tags another one fails
`test_every_random_operator_is_looked_at` by name until the table has a call of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.streams import DefaultGeneratorGuard, StreamOverride, override, shard_stream
from lockstep.streams.override import random_kernels

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(*positional: Any, **keyword: Any) -> Arguments:
    return positional, keyword


def unit() -> Tensor:
    """Numbers in (0, 1), enough of them for the vectorised paths and their tails."""
    return torch.linspace(0.05, 0.95, 70).reshape(7, 10)


def heads() -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value: 2 samples, 2 heads, 5 tokens, 4 features."""
    query = torch.linspace(-1, 1, 80).reshape(2, 2, 5, 4)
    return query, query.flip(2), query.cos()


def recurrent(gates: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Input, first hidden state and weights of 2 layers: 3 steps, 2 samples, 4 features."""
    shapes = [(gates * 4, 4), (gates * 4, 4), (gates * 4,), (gates * 4,)] * 2
    weights = [torch.linspace(-0.5, 0.5, torch.Size(shape).numel()).reshape(shape) for shape in shapes]
    return torch.linspace(-1, 1, 24).reshape(3, 2, 4), torch.zeros(2, 2, 4), weights


def rnn_input(gates: int = 1, *, cell: bool = False) -> Arguments:
    data, hidden, weights = recurrent(gates)
    state = [hidden, hidden] if cell else hidden
    return arguments(data, state, weights, True, 2, 0.5, True, False, False)


def rnn_data(gates: int = 1, *, cell: bool = False) -> Arguments:
    data, hidden, weights = recurrent(gates)
    state = [hidden, hidden] if cell else hidden
    return arguments(data.reshape(6, 4), torch.tensor([2, 2, 2]), state, weights, True, 2, 0.5, True, False)


def nested_query() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4, 3), torch.ones(2, 3, 3)])


def rrelu_with_noise() -> Arguments:
    return arguments(unit() - 0.5, torch.zeros(7, 10), 0.1, 0.3, True)


# Name of the operator: its arguments, without `generator` and `out`, which the tests add.
DRAWS: dict[str, Callable[[], Arguments]] = {
    "_sample_dirichlet": lambda: arguments(unit()),
    "_sample_dirichlet.out": lambda: arguments(unit()),
    "_scaled_dot_product_attention_math": lambda: arguments(*heads(), dropout_p=0.5),
    "_standard_gamma": lambda: arguments(unit()),
    "_standard_gamma.out": lambda: arguments(unit()),
    "alpha_dropout": lambda: arguments(unit(), 0.5, True),
    "alpha_dropout_": lambda: arguments(unit(), 0.5, True),
    "bernoulli": lambda: arguments(unit()),
    "bernoulli.Tensor": lambda: arguments(unit(), unit()),
    "bernoulli.Tensor_out": lambda: arguments(unit(), unit()),
    "bernoulli.float_out": lambda: arguments(unit(), 0.3),
    "bernoulli.out": lambda: arguments(unit()),
    "bernoulli.p": lambda: arguments(unit(), 0.3),
    "bernoulli_.Tensor": lambda: arguments(unit(), unit()),
    "bernoulli_.float": lambda: arguments(unit(), 0.3),
    "binomial": lambda: arguments(torch.full((7, 10), 9.0), unit()),
    "binomial.out": lambda: arguments(torch.full((7, 10), 9.0), unit()),
    "cauchy": lambda: arguments(unit(), 1.0, 2.0),
    "cauchy.out": lambda: arguments(unit(), 1.0, 2.0),
    "cauchy_": lambda: arguments(unit()),
    "dropout": lambda: arguments(unit(), 0.5, True),
    "dropout_": lambda: arguments(unit(), 0.5, True),
    "exponential": lambda: arguments(unit(), 2.0),
    "exponential.out": lambda: arguments(unit(), 2.0),
    "exponential_": lambda: arguments(unit()),
    "feature_alpha_dropout": lambda: arguments(unit(), 0.5, True),
    "feature_alpha_dropout_": lambda: arguments(unit(), 0.5, True),
    "feature_dropout": lambda: arguments(unit(), 0.5, True),
    "feature_dropout_": lambda: arguments(unit(), 0.5, True),
    "geometric": lambda: arguments(unit(), 0.3),
    "geometric.out": lambda: arguments(unit(), 0.3),
    "geometric_": lambda: arguments(unit(), 0.3),
    "gru.data": lambda: rnn_data(3),
    "gru.input": lambda: rnn_input(3),
    "log_normal": lambda: arguments(unit(), 0.5, 1.5),
    "log_normal.out": lambda: arguments(unit(), 0.5, 1.5),
    "log_normal_": lambda: arguments(unit()),
    "lstm.data": lambda: rnn_data(4, cell=True),
    "lstm.input": lambda: rnn_input(4, cell=True),
    "multinomial": lambda: arguments(unit(), 4, True),
    "multinomial.out": lambda: arguments(unit(), 4, True, out=torch.empty(0, dtype=torch.int64)),
    "native_dropout": lambda: arguments(unit(), 0.5, True),
    "native_dropout.out": lambda: arguments(unit(), 0.5, True, out1=torch.empty(0, dtype=torch.bool)),
    "normal.Tensor_Tensor": lambda: arguments(unit(), unit()),
    "normal.Tensor_Tensor_out": lambda: arguments(unit(), unit()),
    "normal.Tensor_float": lambda: arguments(unit(), 2.0),
    "normal.Tensor_float_out": lambda: arguments(unit(), 2.0, out=torch.empty(7, 10)),
    "normal.float_Tensor": lambda: arguments(2.0, unit()),
    "normal.float_Tensor_out": lambda: arguments(2.0, unit()),
    "normal.float_float": lambda: arguments(1.0, 2.0, [7, 10]),
    "normal.float_float_out": lambda: arguments(1.0, 2.0, [7, 10]),
    "normal.out": lambda: arguments(unit(), 1.0, 2.0),
    "normal_": lambda: arguments(unit(), 1.0, 2.0),
    "normal_functional": lambda: arguments(unit(), 1.0, 2.0),
    "poisson": lambda: arguments(unit() * 9),
    "poisson.out": lambda: arguments(unit() * 9),
    "rand": lambda: arguments([7, 10]),
    "rand.generator": lambda: arguments([7, 10]),
    "rand.generator_out": lambda: arguments([7, 10]),
    "rand.out": lambda: arguments([7, 10]),
    "rand.generator_with_names": lambda: arguments([7, 10], names=None),
    "rand.generator_with_names_out": lambda: arguments([7, 10], names=None),
    "rand.names": lambda: arguments([7, 10], names=None),
    "rand.names_out": lambda: arguments([7, 10], names=None),
    "rand_like": lambda: arguments(unit()),
    "rand_like.generator": lambda: arguments(unit()),
    "rand_like.generator_out": lambda: arguments(unit()),
    "rand_like.out": lambda: arguments(unit()),
    "randint": lambda: arguments(9, [7, 10]),
    "randint.generator": lambda: arguments(9, [7, 10]),
    "randint.generator_out": lambda: arguments(9, [7, 10]),
    "randint.low": lambda: arguments(3, 9, [7, 10]),
    "randint.low_generator": lambda: arguments(3, 9, [7, 10]),
    "randint.low_generator_out": lambda: arguments(3, 9, [7, 10]),
    "randint.low_out": lambda: arguments(3, 9, [7, 10]),
    "randint.out": lambda: arguments(9, [7, 10]),
    "randint_like": lambda: arguments(unit(), 9),
    "randint_like.Tensor": lambda: arguments(unit(), torch.tensor(9)),
    "randint_like.Tensor_generator": lambda: arguments(unit(), torch.tensor(9)),
    "randint_like.Tensor_generator_out": lambda: arguments(unit(), torch.tensor(9)),
    "randint_like.Tensor_out": lambda: arguments(unit(), torch.tensor(9)),
    "randint_like.generator": lambda: arguments(unit(), 9),
    "randint_like.generator_out": lambda: arguments(unit(), 9),
    "randint_like.low_dtype": lambda: arguments(unit(), 3, 9),
    "randint_like.low_dtype_out": lambda: arguments(unit(), 3, 9),
    "randint_like.low_generator_dtype": lambda: arguments(unit(), 3, 9),
    "randint_like.low_generator_dtype_out": lambda: arguments(unit(), 3, 9),
    "randint_like.out": lambda: arguments(unit(), 9),
    "randn": lambda: arguments([7, 10]),
    "randn.generator": lambda: arguments([7, 10]),
    "randn.generator_out": lambda: arguments([7, 10]),
    "randn.out": lambda: arguments([7, 10]),
    "randn.generator_with_names": lambda: arguments([7, 10], names=None),
    "randn.generator_with_names_out": lambda: arguments([7, 10], names=None),
    "randn.names": lambda: arguments([7, 10], names=None),
    "randn.names_out": lambda: arguments([7, 10], names=None),
    "randn_like": lambda: arguments(unit()),
    "randn_like.generator": lambda: arguments(unit()),
    "randn_like.generator_out": lambda: arguments(unit()),
    "randn_like.out": lambda: arguments(unit()),
    "random": lambda: arguments(unit()),
    "random.from": lambda: arguments(unit(), 3, 9),
    "random.from_out": lambda: arguments(unit(), 3, 9),
    "random.out": lambda: arguments(unit()),
    "random.to": lambda: arguments(unit(), 9),
    "random.to_out": lambda: arguments(unit(), 9),
    "random_": lambda: arguments(unit()),
    "random_.from": lambda: arguments(unit(), 3, 9),
    "random_.to": lambda: arguments(unit(), 9),
    "randperm": lambda: arguments(70),
    "randperm.generator": lambda: arguments(70),
    "randperm.generator_out": lambda: arguments(70),
    "randperm.out": lambda: arguments(70),
    "rnn_relu.data": rnn_data,
    "rnn_relu.input": rnn_input,
    "rnn_tanh.data": rnn_data,
    "rnn_tanh.input": rnn_input,
    "rrelu": lambda: arguments(unit() - 0.5, 0.1, 0.3, True),
    "rrelu_": lambda: arguments(unit() - 0.5, 0.1, 0.3, True),
    "rrelu_with_noise": rrelu_with_noise,
    # This kernel does not resize its output but writes past its end.
    "rrelu_with_noise.out": lambda: arguments(*rrelu_with_noise()[0], out=torch.empty(7, 10)),
    "rrelu_with_noise_": rrelu_with_noise,
    "rrelu_with_noise_functional": rrelu_with_noise,
    "scaled_dot_product_attention": lambda: arguments(*heads(), dropout_p=0.5),
    "uniform": lambda: arguments(unit(), 1.0, 2.0),
    "uniform.out": lambda: arguments(unit(), 1.0, 2.0),
    "uniform_": lambda: arguments(unit(), 1.0, 2.0),
}

# Tagged, and on a CPU, but nothing random is in them there.
QUIET: dict[str, Callable[[], Arguments]] = {
    "_fused_sdp_choice": lambda: arguments(*heads(), dropout_p=0.5),
    "_nested_tensor_softmax_with_shape": lambda: arguments(torch.ones(2, 2, 4, 4), nested_query()),
    "_scaled_dot_product_flash_attention_for_cpu": lambda: arguments(*heads()),
}

# Has a kernel for every device, which refuses to work.
REFUSED: dict[str, Callable[[], Arguments]] = {
    "_scaled_dot_product_flash_attention_for_cpu": lambda: arguments(*heads(), dropout_p=0.5),
    "_scaled_dot_product_fused_attention_overrideable": lambda: arguments(*heads(), dropout_p=0.5),
}

LEAVES = random_kernels()


def operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def tagged() -> list[str]:
    """List the operators that torch calls random."""
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()]
    names = [name for name in names if "::" not in name and exists(name)]
    return sorted(name for name in names if torch.Tag.nondeterministic_seeded in operator(name).tags)


def exists(name: str) -> bool:
    packet, _, overload = name.partition(".")
    return (overload or "default") in getattr(torch.ops.aten, packet).overloads()


def why_not_on_cpu(name: str) -> str | None:
    """Say by introspection why an operator cannot run on a CPU; None if it can."""
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    if not computed(f"aten::{name}", "CPU") and not registered(f"aten::{name}", "NestedTensorCPU"):
        return "no CPU and no composite kernel"
    functional, _, overload = name.partition(".")
    if overload == "out" and exists(functional) and not registered(f"aten::{name}", "CPU"):
        # The out variants that torch generates call the functional form and copy.
        reason = why_not_on_cpu(functional)
        return f"calls {functional}: {reason}" if reason else None
    return None


def calls(name: str, table: dict[str, Callable[[], Arguments]]) -> list[Callable[[], object]]:
    """Make the calls of an operator: without a generator and, where it takes one, with the default one."""
    op = operator(name)
    declared = [argument.name for argument in op._schema.arguments]

    def call(**generator: torch.Generator | None) -> object:
        positional, keyword = table[name]()
        outs = {name: torch.empty(0) for name in declared if name.startswith("out")} | keyword
        return op(*positional, **generator, **outs), positional  # what is changed in place counts too

    if "generator" not in declared:
        return [call]
    return [lambda: call(generator=None), lambda: call(generator=torch.default_generator)]


def table_of(table: dict[str, Callable[[], Arguments]]) -> list[Any]:
    """List a table's names as test parameters; those that this torch lacks are skipped with that reason."""
    lacks = pytest.mark.skip(reason=f"torch {torch.__version__} lacks the operator")
    return [pytest.param(name, marks=() if exists(name) else lacks) for name in table]


@pytest.mark.parametrize("name", table_of(DRAWS))
def test_a_random_operator_draws_from_the_stream(
    name: str, assert_same_as_serial: Callable[[Callable[[], object]], None]
) -> None:
    for call in calls(name, DRAWS):
        assert_same_as_serial(call)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("name", table_of(QUIET))
def test_a_quiet_operator_draws_nothing(name: str) -> None:
    for call in calls(name, QUIET):
        guard = DefaultGeneratorGuard()
        call()
        assert not guard.moved()


@pytest.mark.parametrize("name", table_of(REFUSED))
def test_a_refused_operator_cannot_draw(name: str) -> None:
    for call in calls(name, REFUSED):
        with pytest.raises(RuntimeError):
            call()


def test_every_random_operator_is_looked_at() -> None:
    assert len(tagged()) >= 100  # 149 in torch 2.13: the tag is still what it was
    open_questions = set(tagged()) - DRAWS.keys() - QUIET.keys() - REFUSED.keys()
    reasons = {name: why_not_on_cpu(name) for name in sorted(open_questions)}
    print(*(f"not on a CPU: {name}: {reason}" for name, reason in reasons.items()), sep="\n")  # noqa: T201
    assert [name for name, reason in reasons.items() if reason is None] == []


def test_an_operator_without_a_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(DRAWS, "native_dropout")
    with pytest.raises(AssertionError, match="native_dropout"):
        test_every_random_operator_is_looked_at()


def test_every_kernel_is_a_random_operator_of_the_table() -> None:
    assert len(LEAVES) >= 20  # 28 in torch 2.13
    assert [name for name in LEAVES if name not in DRAWS] == []


@pytest.mark.parametrize("left_out", LEAVES)
def test_a_kernel_left_out_is_noticed(
    left_out: str,
    assert_same_as_serial: Callable[[Callable[[], object]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Show that the tests above can fail: without this kernel its own row does."""
    others = {name: position for name, position in LEAVES.items() if name != left_out}
    monkeypatch.setattr(override, "random_kernels", lambda: others)
    with pytest.raises(AssertionError, match="something drew from the default generator"):
        assert_same_as_serial(calls(left_out, DRAWS)[0])


@pytest.mark.parametrize("name", ["uniform_", "rrelu_with_noise", "poisson.out", "randperm.generator_out"])
def test_a_generator_of_ones_own_is_respected(name: str, bits: Callable[[object], list[object]]) -> None:
    def draw() -> object:
        positional, keyword = DRAWS[name]()
        outs = {"out": torch.empty(0)} if name.endswith("out") else {}
        return operator(name)(*positional, generator=torch.Generator().manual_seed(3), **outs, **keyword)

    expected = bits(draw())
    guard = DefaultGeneratorGuard()
    with StreamOverride():
        assert bits(draw()) == expected
        with shard_stream(5):
            assert bits(draw()) == expected
            assert bits(torch.rand(3)) == bits(torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert not guard.moved()
