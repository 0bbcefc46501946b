"""MXNet's names do what its document says, on CPU devices."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.compat.mxnet import DataBatch, DataDesc, DataParallelExecutorGroup, split_input_slice

DATA = [DataDesc("data", (6, 5))]
LABEL = [DataDesc("softmax_label", (6,))]


class Mlp(nn.Module):
    """Returns the mean loss where it is given labels, else scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(5, 4), nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, data: torch.Tensor, softmax_label: torch.Tensor | None = None) -> torch.Tensor:
        self.seen = self.seen + 1
        scores = self.fc2(torch.tanh(self.fc1(data)))
        return scores if softmax_label is None else nn.functional.cross_entropy(scores, softmax_label.long())


def batch(n: int = 6, *, labels: bool = False, pad: int | None = None) -> DataBatch:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(n, 5, generator=generator)
    label = torch.randint(3, (n,), generator=generator).float()
    return DataBatch([data], [label] if labels else None, pad)


@pytest.fixture
def groups() -> Iterator[Any]:
    """Make groups, and close them."""
    made: list[DataParallelExecutorGroup] = []

    def make(
        model: nn.Module | None = None,
        workload: list[float] | None = None,
        label_shapes: Any = None,
        *,
        num_devices: int = 2,
        param_names: Any = None,
        for_training: bool = True,
        inputs_need_grad: bool = False,
        **options: Any,
    ) -> DataParallelExecutorGroup:
        group = DataParallelExecutorGroup(
            Mlp() if model is None else model,
            ["cpu"] * num_devices,
            workload,
            options.pop("data_shapes", DATA),
            label_shapes,
            param_names,
            for_training,
            inputs_need_grad,
            **options,
        )
        made.append(group)
        return group

    yield make
    for group in made:
        group.core.close()


def test_a_batch_is_split_by_mxnets_own_rule(groups: Any) -> None:
    group = groups(data_shapes=[DataDesc("data", (8, 5))], num_devices=6)
    group.forward(batch(8))
    assert [len(part) for part in group.get_outputs()[0]] == [1, 1, 1, 1, 1, 3]
    (merged,) = group.get_outputs_merged()
    assert torch.equal(torch.cat(group.get_outputs()[0]), merged)
    assert group.get_batch_size() == 8
    assert group.get_output_shapes() == [("output", (8, 3))]


def test_a_step_of_training_is_that_of_one_device(groups: Any) -> None:
    model, plain = Mlp(), Mlp()
    group = groups(model, [1, 2], LABEL)
    given = batch(labels=True)
    group.forward(given)
    group.backward()
    plain(given.data[0], given.label[0]).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-7)


def test_gradients_of_outputs_and_of_inputs(groups: Any) -> None:
    model, plain = Mlp(), Mlp()
    group = groups(model, inputs_need_grad=True)
    given, out_grad = batch(), torch.randn(6, 3)
    for out_grads in ([out_grad], out_grad):
        group.forward(given)
        group.backward(out_grads)
        x = given.data[0].clone().requires_grad_()
        plain.zero_grad()
        plain(x).backward(out_grad)
        (merged,), ((first, second),) = group.get_input_grads_merged(), group.get_input_grads()
        assert torch.allclose(merged, x.grad, atol=1e-6)
        assert torch.equal(torch.cat([first, second]), merged)
        assert torch.allclose(model.fc1.weight.grad, plain.fc1.weight.grad, atol=1e-6)


def test_one_batch_for_each_device(groups: Any) -> None:
    group = groups(label_shapes=LABEL)
    whole = batch(labels=True)
    group.forward(whole)
    expected = group.get_outputs_merged()
    parts = [DataBatch([whole.data[0][run]], [whole.label[0][run]]) for run in (slice(0, 3), slice(3, 6))]
    group.forward(parts)
    assert torch.equal(group.get_outputs_merged()[0], expected[0])


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({}, {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}),
        ({"param_names": ["fc2.bias"]}, {"fc2.bias"}),
        ({"fixed_param_names": ["fc1.weight"]}, {"fc1.bias", "fc2.weight", "fc2.bias"}),
        ({"grad_req": "null"}, set()),
        ({"grad_req": ["null", "write", "null", "add", "null"]}, {"fc1.weight", "fc2.weight"}),
        ({"grad_req": {"fc1.weight": "null", "data": "null"}}, {"fc1.bias", "fc2.weight", "fc2.bias"}),
        (
            {"grad_req": {"fc1.weight": "write"}, "fixed_param_names": ["fc1.weight", "fc1.bias"]},
            {"fc1.weight", "fc2.weight", "fc2.bias"},
        ),
    ],
)
def test_who_gets_a_gradient(groups: Any, options: dict[str, Any], moved: set[str]) -> None:
    model = Mlp()
    group = groups(model, **options)
    group.forward(batch())
    group.backward(torch.ones(6, 3))
    assert {name for name, each in model.named_parameters() if each.grad is not None} == moved


def test_gradients_may_add_up(groups: Any) -> None:
    model = Mlp()
    group = groups(model, grad_req="add", inputs_need_grad=True)
    for _ in range(2):
        group.forward(batch())
        group.backward(torch.ones(6, 3))
    assert torch.equal(model.fc2.bias.grad, torch.full((3,), 12.0))


@pytest.mark.parametrize("grad_req", [{"data": "add"}, ["add", "write", "null", "write", "write"]])
def test_gradients_of_data_may_add_up_by_themselves(groups: Any, grad_req: Any) -> None:
    model = Mlp()
    group = groups(model, grad_req=grad_req)
    found = []
    for _ in range(2):
        group.forward(batch())
        group.backward(torch.ones(6, 3))
        found.append(group.get_input_grads_merged()[0].clone())
    assert torch.equal(found[1], 2 * found[0])
    assert torch.equal(model.fc2.bias.grad, torch.full((3,), 6.0))


def test_parameters_are_copied_in_place(groups: Any) -> None:
    model = Mlp()
    group = groups(model)
    arg = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    aux = {"seen": torch.ones(())}
    targets = dict(arg)
    group.get_params({**arg, "other": torch.ones(1)}, aux)
    assert all(torch.equal(targets[name], each) for name, each in model.named_parameters())
    assert aux["seen"] == 0
    kept = copy.deepcopy(aux)
    with pytest.raises(KeyError, match=r"fc2\.bias"):
        group.get_params({name: each for name, each in arg.items() if name != "fc2.bias"}, aux)
    assert aux == kept


def test_parameters_are_set_all_or_none(groups: Any) -> None:
    model = Mlp()
    group = groups(model)
    before = ls.digest(model)
    with pytest.raises(ValueError, match="zzz unknown"):
        group.set_params({"fc1.bias": torch.ones(4), "zzz": torch.ones(1)}, None)
    assert ls.digest(model) == before
    group.set_params({"fc1.bias": torch.ones(4), "zzz": torch.ones(1)}, {"seen": torch.full((), 7.0)}, True)
    assert torch.equal(model.fc1.bias, torch.ones(4))
    assert model.seen == 7


def test_shapes_change_all_or_none(groups: Any) -> None:
    model = Mlp()
    group = groups(model, [1, 2], LABEL)
    group.forward(batch(labels=True))
    group.backward()
    gradient = model.fc1.weight.grad.clone()
    with pytest.raises(ValueError, match="by which device"):
        group.reshape([DataDesc("data", (1, 5))], [DataDesc("softmax_label", (1,))])
    with pytest.raises(ValueError, match="must name"):
        group.reshape([DataDesc("other", (9, 5))], [DataDesc("softmax_label", (9,))])
    assert group.get_batch_size() == 6
    group.forward(batch(labels=True))
    group.reshape([DataDesc("data", (9, 5))], [DataDesc("softmax_label", (9,))])
    assert torch.equal(model.fc1.weight.grad, gradient)
    group.forward(batch(9, labels=True))
    assert [run.stop - run.start for run in group.core.slices] == [3, 6]
    with pytest.raises(ls.OrderError, match="bound once"):
        group.bind_exec(DATA, LABEL, None)
    group.bind_exec(DATA, LABEL, None, reshape=True)
    assert group.get_batch_size() == 6


def test_another_batch_size_than_the_bound_one_is_refused(groups: Any) -> None:
    group = groups()
    for size in (5, 7):
        with pytest.raises(ValueError, match="must have the shape it was bound with"):
            group.forward(batch(size))


class Counting:
    """A metric that records the numbers of samples."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.sizes.append((len(output), len(target)))


class Product(nn.Module):
    """Multiplies the input by the labels where there are some."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x if y is None else x * y


def test_a_new_layout_decides_the_dimension_of_samples(groups: Any) -> None:
    group = groups(Product(), data_shapes=[DataDesc("x", (4, 2), layout="NC")], output_layouts={"output": "CN"})
    group.reshape([DataDesc("x", (4, 2), layout="CN")], None)  # equal descriptions, as in MXNet
    assert group.get_batch_size() == 4
    with pytest.raises(ValueError, match="must name the inputs that are bound"):
        group.reshape([DataDesc("y", (3, 6), layout="CN")], None)
    assert group.get_batch_size() == 4
    group.reshape([DataDesc("x", (3, 6), layout="CN")], None)
    x = torch.arange(18.0).reshape(3, 6)
    group.forward(DataBatch([x]))
    assert group.get_batch_size() == 6
    assert [tuple(part.shape) for part in group.get_outputs()[0]] == [(3, 3), (3, 3)]
    assert torch.equal(group.get_outputs_merged()[0], x)
    # One batch for each device is joined along the new dimension, too.
    group.forward([DataBatch([x[:, :3]]), DataBatch([x[:, 3:]])])
    assert torch.equal(group.get_outputs_merged()[0], x)


def test_labels_may_come_and_go_with_a_reshape(groups: Any) -> None:
    group = groups(Product(), None, [DataDesc("y", (4,))], data_shapes=[DataDesc("x", (4,))])
    x, y = torch.arange(6.0), torch.full((6,), 2.0)
    group.reshape([DataDesc("x", (6,))], None)
    group.forward(DataBatch([x], [y]))
    assert torch.equal(group.get_outputs_merged()[0], x)
    group.reshape([DataDesc("x", (6,))], [DataDesc("y", (6,))])
    group.forward(DataBatch([x], [y]))
    assert torch.equal(group.get_outputs_merged()[0], x * y)
    with pytest.raises(ValueError, match="`labels` must name the inputs that are bound"):
        group.reshape([DataDesc("x", (4,))], [DataDesc("z", (4,))])


def test_an_array_without_samples_is_the_same_for_every_device(groups: Any) -> None:
    group = groups(Product(), data_shapes=[DataDesc("x", (4, 1)), DataDesc("y", (1,), layout="C")])
    x, one, two = torch.ones(2, 1), torch.ones(1), torch.full((1,), 2.0)
    group.forward([DataBatch([x, two]), DataBatch([x, two.clone()])])
    assert torch.equal(group.get_outputs_merged()[0], torch.full((4, 1), 2.0))
    with pytest.raises(ValueError, match=r"`data_batch` must hold the same 'y' for every device"):
        group.forward([DataBatch([x, one]), DataBatch([x, two])])


@pytest.mark.parametrize("grad_req", ["add", ["write"] * 5, {"data": "write", "fc1.bias": "add"}])
def test_inference_ignores_gradient_modes(groups: Any, grad_req: Any) -> None:
    groups(for_training=False, grad_req=grad_req).forward(batch())
    with pytest.raises(ValueError, match="`inputs_need_grad` must be False if `for_training` is"):
        groups(for_training=False, grad_req=grad_req, inputs_need_grad=True)


def test_the_parameters_of_param_names_are_copied(groups: Any) -> None:
    model = Mlp()
    target = torch.zeros_like(model.fc2.bias)
    groups(model, param_names=["fc2.bias"]).get_params({"fc2.bias": target}, {"seen": torch.ones(())})
    assert torch.equal(target, model.fc2.bias)


def test_no_gradients_of_outputs_are_those_of_a_loss(groups: Any) -> None:
    model = Mlp()
    group = groups(model, None, LABEL)
    group.forward(batch(labels=True))
    group.backward([])
    gradient = model.fc1.weight.grad.clone()
    group.backward()
    assert torch.equal(model.fc1.weight.grad, gradient)


def test_a_sum_over_samples_is_the_gradient_of_ones(groups: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = Scaled()
    group = groups(model, [2, 1], data_shapes=[DataDesc("x", (6,))])
    group.forward(DataBatch([torch.arange(6.0)]))
    group.backward(torch.ones(6))
    assert model.weight.grad == 15


def test_a_metric_gets_a_label_without_samples_whole(groups: Any) -> None:
    counting = Counting()
    group = groups(Product(), None, [DataDesc("y", (3,), layout="C")], data_shapes=[DataDesc("x", (4, 3))])
    group.forward(DataBatch([torch.ones(4, 3)], [torch.ones(3)]))
    group.update_metric(counting, [torch.ones(3)])
    assert counting.sizes == [(2, 3), (2, 3)]


def test_two_groups_share_memory_and_not_outputs(groups: Any) -> None:
    first, second = Mlp(), Mlp()
    main = groups(first)
    other = groups(second, data_shapes=[DataDesc("data", (4, 5))], shared_group=main)
    main.forward(batch())
    (before,) = main.get_outputs_merged()
    kept = before.clone()
    other.forward(batch(4))
    other.backward(torch.ones(4, 3))
    assert torch.equal(main.get_outputs_merged()[0], kept)
    assert second.fc1.weight is first.fc1.weight


def test_inference_needs_no_gradients(groups: Any) -> None:
    group = groups(nn.Sequential(nn.Dropout(), nn.Linear(5, 3)), for_training=False)
    group.forward(batch())
    first = group.get_outputs_merged()[0]
    group.forward(batch())
    assert torch.equal(group.get_outputs_merged()[0], first)
    with pytest.raises(ls.OrderError, match="training=True"):
        group.backward(torch.ones(6, 3))
    group.forward(batch(), is_train=True)
    assert not torch.equal(group.get_outputs_merged()[0], first)


def test_layouts_say_where_samples_are(groups: Any) -> None:
    class Mix(nn.Module):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return x * table

    shapes = [DataDesc("x", (7, 6, 2), layout="TNC"), DataDesc("table", (7, 1, 2), layout="TC")]
    group = groups(Mix(), [1, 2], data_shapes=shapes, inputs_need_grad=True, output_layouts={"output": "TNC"})
    x, table = torch.randn(7, 6, 2), torch.randn(7, 1, 2)
    group.forward(DataBatch([x, table]))
    assert torch.equal(group.get_outputs_merged()[0], x * table)
    assert [tuple(part.shape) for part in group.get_outputs()[0]] == [(7, 2, 2), (7, 4, 2)]
    group.backward([torch.ones(7, 6, 2)])
    # Of what every device got whole the gradient is the sum.
    assert torch.allclose(group.get_input_grads_merged()[1], x.sum(1, keepdim=True), atol=1e-5)


def test_a_metric_is_updated_once_a_device_and_passes_over_padding(groups: Any) -> None:
    counting, given = Counting(), batch(pad=1)
    group = groups(workload=[1, 2])
    group.forward(given)
    group.update_metric(counting, [torch.zeros(6)])
    assert counting.sizes == [(2, 2), (3, 3)]
    accuracy = ls.metrics.Accuracy()
    group.update_metric(accuracy, [torch.zeros(6).long()])
    right = (group.get_outputs_merged()[0][:5].argmax(1) == 0).sum().item()
    assert accuracy.compute() == right / 5


def test_a_monitor_sees_every_device(groups: Any) -> None:
    group = groups()
    monitor = ls.Monitor(interval=1, pattern="fc2.output")
    group.install_monitor(monitor)
    monitor.tic()
    group.forward(batch())
    assert [(row.name, row.replica) for row in monitor.toc()] == [("fc2.output", 0), ("fc2.output", 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workload": [1, 2, 3]}, "must hold one workload per device"),
        ({"workload": [0, 0]}, "finite sum other than 0"),
        ({"num_devices": 7}, "by which device 6 has none"),
        ({"grad_req": "foo"}, "must be 'write', 'add' or 'null'"),
        ({"grad_req": ["write"]}, "hold one mode for each of .*, got 1"),
        ({"grad_req": {"nope": "write"}}, "must name some of"),
        (
            {"grad_req": {"data": "sum"}},
            r"`input_grads\['data'\]` must be 'write', 'add' or 'null', got 'sum'",
        ),
        ({"fixed_param_names": ["nope"]}, "must name parameters"),
        ({"state_names": ["s0"]}, "`state_names` must be None"),
        ({"group2ctxs": {"dev1": "cpu"}}, "`group2ctxs` must be None"),
        ({"label_shapes": [DataDesc("softmax_label", (5,))]}, "must hold as many samples"),
    ],
)
def test_what_does_not_fit_is_refused(groups: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups(**options)


def test_gradients_that_do_not_fit_are_refused(groups: Any) -> None:
    group = groups()
    with pytest.raises(ls.OrderError):
        group.backward(torch.ones(6, 3))
    group.forward(batch())
    for grads in ([torch.ones(6, 3)] * 2, [torch.ones(5, 3)], None):
        with pytest.raises(ValueError, match=r"out_grads|output_grads"):
            group.backward(grads)
    with pytest.raises(ls.OrderError, match="input_grads=True"):
        group.get_input_grads()


def test_the_cut_is_logged(groups: Any, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("lockstep.test")
    with caplog.at_level(logging.DEBUG, logger.name):
        groups(logger=logger)
    assert "A batch of 6 samples is split into [slice(0, 3, None), slice(3, 6, None)]." in caplog.text


def test_descriptions_are_equal_by_name_and_shape() -> None:
    one = DataDesc("data", [6, 5])
    assert (one.shape, one.dtype, one.layout) == ((6, 5), torch.float32, "NCHW")
    assert one == DataDesc("data", (6, 5), torch.float16, "TN")
    assert one != DataDesc("data", (6, 4))
    assert hash(one) == hash(DataDesc("data", (6, 5), layout=None))
    assert pickle.loads(pickle.dumps(DataDesc("x", (1, 2), layout="TN"))).batch_axis == 1  # noqa: S301 - our own


def test_a_description_is_a_pair_of_a_name_and_a_shape() -> None:
    one = DataDesc("data", (6, 5), torch.float16)
    name, shape = one
    assert (name, shape) == one == ("data", (6, 5))
    assert (one[1], dict([one]), one._fields) == ((6, 5), {"data": (6, 5)}, ("name", "shape"))
    assert str(one) == "DataDesc[data,(6, 5),torch.float16,NCHW]"
    assert copy.deepcopy(one).dtype == torch.float16
    (listed,) = DataDesc.get_list([("data", (6, 5))], [("data", torch.float16)])
    assert (listed, listed.dtype) == (one, torch.float16)
    assert DataDesc.get_list([("data", (6, 5))], None)[0].dtype == torch.float32


def test_a_batch_holds_what_is_given() -> None:
    given = DataBatch([torch.ones(2)], None, 1, [3, 4], "key", DATA, LABEL)
    assert (given.pad, given.index, given.bucket_key) == (1, [3, 4], "key")
    assert (given.provide_data, given.provide_label) == (DATA, LABEL)


def test_groups_are_objects_like_any(groups: Any) -> None:
    group, other = groups(), groups()
    assert group == group  # noqa: PLR0124 - that is what is tested
    assert group != other
    assert isinstance(hash(group), int)
    assert type(group) is DataParallelExecutorGroup
    assert "DataParallelExecutorGroup" in str(group)
    group.core.close()
    with pytest.raises(ls.OrderError, match="closed"):
        group.forward(batch())


def test_the_last_device_gets_what_is_left() -> None:
    assert split_input_slice(10, [1, 1, 1, 1])[-1] == slice(6, 10)
    # The workloads add up to 1.2000000000000002 in ordinary arithmetic, which rounds 7.5 down.
    assert split_input_slice(30, [0.3, 0.5, 0.4])[0] == slice(0, 7)
    with pytest.raises(ValueError, match="must leave a sample for every device"):
        split_input_slice(9, [1] * 6)


@pytest.mark.parametrize(
    ("loads", "rule"), [([0.1, 0.2, -0.3], "scala"), ([1e308, 1e308], "python"), ([1e308], "python"), ([], "scala")]
)
def test_a_sum_or_a_share_that_is_no_number_is_refused(loads: list[float], rule: Any) -> None:
    """The first sum is 0 in float32 only, and a product overflows that the loads do not show."""
    with pytest.raises(ValueError, match="must have a finite sum other than 0"):
        split_input_slice(4, loads, rule=rule)
