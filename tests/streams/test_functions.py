"""What users write draws from the thread's stream too: functions, modules, initialisations, distributions."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.distributions as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody knows

import lockstep as ls
from tests.support.runs import finalized

Draw = Callable[[], object]


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def trained(module: nn.Module, *inputs: Tensor) -> object:
    """Initialise, compute and differentiate: every gradient counts."""
    outputs = module(*inputs)
    output = outputs[0] if isinstance(outputs, tuple) else outputs
    output.square().sum().backward()
    return output, [parameter.grad for parameter in module.parameters()]


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16, dropout=0.5, batch_first=True)


def recurrent(kind: type[nn.RNNBase]) -> object:
    # Two layers, because dropout works between them.
    return trained(kind(4, 4, num_layers=2, dropout=0.5), torch.ones(3, 2, 4))


def packed() -> object:
    inputs = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    return nn.LSTM(4, 4, num_layers=2, dropout=0.5)(inputs)[0].data


def user_loop() -> object:
    """Mix draws of all sorts, so that each starts where another stopped."""
    noise = [torch.rand(3), torch.randn(17), torch.randperm(9), torch.randint(5, (4,))]
    return noise, F.dropout(ones(50)), torch.normal(0.0, 1.0, (5,)), torch.randn(1), torch.randn(1)


def under_autocast() -> object:
    with torch.autocast("cpu", torch.bfloat16):
        return trained(encoder(), torch.ones(2, 5, 8))


def under_inference() -> object:
    with torch.inference_mode():
        return F.dropout(torch.ones(40))


FUNCTIONS: dict[str, Draw] = {
    "rand": lambda: torch.rand(2, 3),
    "rand in float64": lambda: torch.rand(40, dtype=torch.float64),
    "rand in bfloat16": lambda: torch.rand(40, dtype=torch.bfloat16),
    "randn": lambda: torch.randn(15),
    "randn of 16 and more": lambda: torch.randn(35),
    "randn complex": lambda: torch.randn(5, dtype=torch.complex64),
    "randint": lambda: torch.randint(2, 9, (20,)),
    "randint of 64 bits": lambda: torch.randint(0, 2**62, (20,)),
    "randperm": lambda: torch.randperm(50),
    "randperm of int32": lambda: torch.randperm(50, dtype=torch.int32),
    "rand_like": lambda: torch.rand_like(ones(5)),
    "randn_like": lambda: torch.randn_like(ones(5)),
    "randint_like": lambda: torch.randint_like(ones(5), 9),
    "out=": lambda: torch.rand(4, out=torch.empty(4)),
    "normal": lambda: [torch.normal(0.0, 2.0, (4,)), torch.normal(torch.ones(4), 2.0)],
    "bernoulli": lambda: torch.bernoulli(torch.full((40,), 0.5)),
    "multinomial without replacement": lambda: torch.multinomial(torch.ones(9), 4),
    "multinomial with replacement": lambda: torch.multinomial(torch.ones(9), 14, replacement=True),
    "multinomial of one": lambda: torch.multinomial(torch.ones(2, 9), 1),
    "poisson": lambda: torch.poisson(torch.full((40,), 4.0)),
    "binomial": lambda: torch.binomial(torch.full((40,), 9.0), torch.full((40,), 0.3)),
    "in place": lambda: [
        torch.empty(40).uniform_(),
        torch.empty(40).normal_(),
        torch.empty(40).exponential_(),
        torch.empty(40).cauchy_(),
        torch.empty(40).geometric_(0.3),
        torch.empty(40).log_normal_(),
        torch.empty(40).bernoulli_(0.3),
        torch.empty(40).random_(),
        torch.empty(40).random_(9),
        torch.empty(40).random_(3, 9),
    ],
    "in place, not contiguous": lambda: torch.zeros(9, 8).t().normal_(),
    "user code": user_loop,
    "dropout": lambda: F.dropout(ones(40)),
    "dropout1d": lambda: F.dropout1d(ones(2, 9, 2)),
    "dropout2d": lambda: F.dropout2d(ones(2, 9, 2, 2)),
    "dropout3d": lambda: F.dropout3d(ones(2, 9, 2, 2, 2)),
    "alpha_dropout": lambda: F.alpha_dropout(ones(40), training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(ones(2, 9, 2), training=True),
    "dropout in place": lambda: F.dropout(torch.ones(40), inplace=True),
    "rrelu": lambda: F.rrelu(ones(40).neg(), training=True),
    "rrelu in place": lambda: F.rrelu(torch.ones(40).neg(), training=True, inplace=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(ones(3, 4), hard=True),
    "attention": lambda: F.scaled_dot_product_attention(*3 * (ones(2, 2, 5, 4),), dropout_p=0.5),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(torch.ones(1, 2, 8, 8).cumsum(2), 2, output_size=3),
    "fractional_max_pool3d": lambda: F.fractional_max_pool3d(torch.ones(1, 2, 8, 8, 8).cumsum(2), 2, output_size=3),
    "svd_lowrank": lambda: torch.svd_lowrank(torch.eye(6), q=2),
    "pca_lowrank": lambda: torch.pca_lowrank(torch.eye(6), q=2),
    "lobpcg": lambda: torch.lobpcg(torch.diag(torch.arange(1.0, 13.0)), k=2),
    "vmap, different": lambda: torch.vmap(lambda x: x + torch.randn(3), randomness="different")(ones(4)),
    "vmap, same": lambda: torch.vmap(lambda x: x + torch.randn(3), randomness="same")(ones(4)),
    "vmap of dropout": lambda: torch.vmap(F.dropout, randomness="different")(ones(4, 9)),
    "vmap of dropout, same": lambda: torch.vmap(F.dropout, randomness="same")(ones(4, 9)),
    "grad of dropout": lambda: torch.func.grad(lambda x: F.dropout(x).sum())(torch.ones(40)),
    "autocast": under_autocast,
    "inference mode": under_inference,
    "Sobol engine": lambda: torch.quasirandom.SobolEngine(3, scramble=True).draw(4),
    "random_split": lambda: [part.indices for part in torch.utils.data.random_split(range(9), [4, 5])],
    "DataLoader": lambda: list(torch.utils.data.DataLoader(range(9), shuffle=True)),  # type: ignore[arg-type]
    "nn.Dropout": lambda: trained(nn.Sequential(nn.Linear(4, 40), nn.Dropout()), torch.ones(2, 4)),
    "nn.RReLU": lambda: trained(nn.Sequential(nn.Linear(4, 40), nn.RReLU()), torch.ones(2, 4)),
    "nn.LSTM": lambda: recurrent(nn.LSTM),
    "nn.GRU": lambda: recurrent(nn.GRU),
    "nn.RNN": lambda: recurrent(nn.RNN),
    "nn.LSTM, packed": packed,
    "nn.MultiheadAttention": lambda: trained(nn.MultiheadAttention(8, 2, dropout=0.5), *3 * (torch.ones(5, 2, 8),)),
    "nn.TransformerEncoderLayer": lambda: trained(encoder(), torch.ones(2, 5, 8)),
    "nn.Embedding": lambda: nn.Embedding(9, 4).weight,
    "nn.Conv2d": lambda: nn.Conv2d(3, 4, 3).weight,
    "nn.utils.parametrizations.orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)).weight,
}


INITS: dict[str, Draw] = {
    "kaiming_normal_": lambda: nn.init.kaiming_normal_(torch.empty(5, 6)),
    "kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(5, 6)),
    "normal_": lambda: nn.init.normal_(torch.empty(5, 6)),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(5, 6)),
    "sparse_": lambda: nn.init.sparse_(torch.empty(5, 6), 0.4),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(5, 6)),
    "uniform_": lambda: nn.init.uniform_(torch.empty(5, 6)),
    "xavier_normal_": lambda: nn.init.xavier_normal_(torch.empty(5, 6)),
    "xavier_uniform_": lambda: nn.init.xavier_uniform_(torch.empty(5, 6)),
}
FIXED_INITS = {"constant_", "dirac_", "eye_", "ones_", "zeros_"}

half = torch.tensor([0.5])
one = torch.tensor([1.0])
DISTRIBUTIONS: dict[str, Callable[[], dist.Distribution]] = {
    "Bernoulli": lambda: dist.Bernoulli(half),
    "Beta": lambda: dist.Beta(half, one),
    "Binomial": lambda: dist.Binomial(9, half),
    "Categorical": lambda: dist.Categorical(torch.ones(5)),
    "Cauchy": lambda: dist.Cauchy(half, one),
    "Chi2": lambda: dist.Chi2(one),
    "ContinuousBernoulli": lambda: dist.ContinuousBernoulli(half),
    "Dirichlet": lambda: dist.Dirichlet(torch.ones(5)),
    "Exponential": lambda: dist.Exponential(one),
    "FisherSnedecor": lambda: dist.FisherSnedecor(one, one),
    "Gamma": lambda: dist.Gamma(half, one),
    "GeneralizedPareto": lambda: dist.GeneralizedPareto(half, one, half),
    "Geometric": lambda: dist.Geometric(half),
    "Gumbel": lambda: dist.Gumbel(half, one),
    "HalfCauchy": lambda: dist.HalfCauchy(one),
    "HalfNormal": lambda: dist.HalfNormal(one),
    "Independent": lambda: dist.Independent(dist.Normal(torch.zeros(5), one), 1),
    "InverseGamma": lambda: dist.InverseGamma(half, one),
    "Kumaraswamy": lambda: dist.Kumaraswamy(half, one),
    "LKJCholesky": lambda: dist.LKJCholesky(3),
    "Laplace": lambda: dist.Laplace(half, one),
    "LogNormal": lambda: dist.LogNormal(half, one),
    "LogisticNormal": lambda: dist.LogisticNormal(torch.zeros(3), torch.ones(3)),
    "LowRankMultivariateNormal": lambda: dist.LowRankMultivariateNormal(
        torch.zeros(2), torch.ones(2, 1), torch.ones(2)
    ),
    "MixtureSameFamily": lambda: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(3)), dist.Normal(torch.zeros(3), torch.ones(3))
    ),
    "Multinomial": lambda: dist.Multinomial(9, torch.ones(5)),
    "MultivariateNormal": lambda: dist.MultivariateNormal(torch.zeros(3), torch.eye(3)),
    "NegativeBinomial": lambda: dist.NegativeBinomial(9, half),
    "Normal": lambda: dist.Normal(half, one),
    "OneHotCategorical": lambda: dist.OneHotCategorical(torch.ones(5)),
    "OneHotCategoricalStraightThrough": lambda: dist.OneHotCategoricalStraightThrough(torch.ones(5)),
    "Pareto": lambda: dist.Pareto(half, one),
    "Poisson": lambda: dist.Poisson(one),
    "RelaxedBernoulli": lambda: dist.RelaxedBernoulli(one, half),
    "RelaxedOneHotCategorical": lambda: dist.RelaxedOneHotCategorical(one, torch.ones(5)),
    "StudentT": lambda: dist.StudentT(one),
    "TransformedDistribution": lambda: dist.TransformedDistribution(dist.Normal(half, one), [dist.ExpTransform()]),
    "Uniform": lambda: dist.Uniform(half, one),
    "VonMises": lambda: dist.VonMises(half, one),
    "Weibull": lambda: dist.Weibull(half, one),
    "Wishart": lambda: dist.Wishart(torch.tensor([4.0]), torch.eye(3)),
}
ABSTRACT_DISTRIBUTIONS = {"Distribution", "ExponentialFamily"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_draws_from_the_stream(name: str, assert_same_as_serial: Callable[[Draw], None]) -> None:
    assert_same_as_serial(FUNCTIONS[name])


@pytest.mark.parametrize("name", INITS)
def test_an_initialisation_draws_from_the_stream(name: str, assert_same_as_serial: Callable[[Draw], None]) -> None:
    assert_same_as_serial(INITS[name])


# Wishart warns of every sample it has checked, whether it is singular or not.
@pytest.mark.filterwarnings("ignore:Singular sample detected")
@pytest.mark.parametrize("name", [name for name in DISTRIBUTIONS if hasattr(dist, name)])
def test_a_distribution_draws_from_the_stream(name: str, assert_same_as_serial: Callable[[Draw], None]) -> None:
    assert_same_as_serial(lambda: DISTRIBUTIONS[name]().sample((20,)))


def test_every_initialisation_is_looked_at() -> None:
    members = inspect.getmembers(nn.init, inspect.isfunction)
    names = {name for name, _ in members if name.endswith("_") and not name.startswith("_")}
    assert names == INITS.keys() | FIXED_INITS


def test_every_distribution_is_looked_at() -> None:
    members = inspect.getmembers(dist, inspect.isclass)
    names = {name for name, member in members if issubclass(member, dist.Distribution)}
    assert names - ABSTRACT_DISTRIBUTIONS - DISTRIBUTIONS.keys() == set()


def test_methods_of_the_default_generator_act_on_the_stream_of_the_thread() -> None:
    def same_masks(model: nn.Module, x: Tensor) -> Tensor:
        state = torch.default_generator.get_state()
        one = model(x)
        torch.default_generator.set_state(state)
        other = model(x)
        assert torch.equal(one, other)
        return one.square().mean() + (one - other).square().mean()

    digests = set()
    for devices in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with finalized(
            ls.ParallelUpdater(
                [(torch.ones(8, 5),)], optimizer, model, devices=["cpu"] * devices, num_shards=4, loss_fn=same_masks
            )
        ) as updater:
            for _ in range(3):
                updater.update()
        digests.add(ls.digest(model))
        assert type(torch.default_generator) is torch.Generator
    assert len(digests) == 1
