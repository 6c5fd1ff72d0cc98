"""LinearList as the list it replaced: code written for a ModuleList keeps working over its heads."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import LinearList


@pytest.fixture
def layer() -> LinearList:
    torch.manual_seed(0)
    return LinearList(3, 2, 5)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(1))


LOOPS = {
    "enumerate": lambda m, x: [linear(x[:, n]) for n, linear in enumerate(m)],
    "index": lambda m, x: [m[n](x[:, n]) for n in range(len(m))],
    "zip": lambda m, x: [linear(part) for linear, part in zip(m, x.unbind(1), strict=True)],
    "functional": lambda m, x: [F.linear(x[:, n], m[n].weight, m[n].bias) for n in range(len(m))],
    "forward": lambda m, x: [m[n].forward(x[:, n]) for n in range(len(m))],
    "slices": lambda m, x: [m[0](x[:, 0])] + [linear(x[:, n]) for n, linear in enumerate(m[1:], 1)],
    "negative": lambda m, x: [m[n - 5](x[:, n]) for n in range(5)],
    "reversed": lambda m, x: [m(p) for m, p in zip(reversed(m), reversed(x.unbind(1)), strict=True)][::-1],
    "map": lambda m, x: list(map(lambda linear, part: linear(part), m, x.unbind(1))),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_loops_give_the_loop_s_numbers_and_gradients(kind: str, layer: LinearList, x: Tensor) -> None:
    old = layer.to_linears()
    for _ in range(2):  # a second pass over rows whose graph has been used
        for model in (layer, old):
            model.zero_grad()
            y = torch.stack(LOOPS[kind](model, x), 1)
            y.square().sum().backward()
            if model is layer:
                new = y
        assert torch.equal(new, y)
        for n, linear in enumerate(old):
            assert torch.equal(layer.weight.grad[n], linear.weight.grad)
            assert torch.equal(layer.bias.grad[n], linear.bias.grad)
        with torch.no_grad():
            for model in (layer, old):
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)


def test_a_loop_of_calls_has_one_backward_node_for_the_stack(layer: LinearList, x: Tensor) -> None:
    def stack_nodes(y: Tensor) -> set:
        seen, todo = set(), [y.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo += [parent for parent, _ in node.next_functions]
        return {n for n in seen if any("AccumulateGrad" in p.name() for p, _ in n.next_functions if p)}

    y = torch.stack(LOOPS["index"](layer, x), 1)
    assert sorted(node.name() for node in stack_nodes(y)) == ["UnbindBackward0"] * 2  # weight and bias


def test_rows_follow_every_change_of_the_stack(layer: LinearList, x: Tensor) -> None:
    def current() -> bool:
        return torch.equal(layer[1](x[:, 1]), F.linear(x[:, 1], layer.weight[1], layer.bias[1]))

    heads = list(layer)
    assert current()
    with torch.no_grad():
        layer.weight.mul_(2)
    assert current() and torch.equal(heads[1](x[:, 1]), layer[1](x[:, 1]))
    layer.weight.data = torch.randn(5, 2, 3)
    assert current()
    layer.weight = torch.nn.Parameter(torch.randn(5, 2, 3))
    assert current()
    layer.double()
    assert heads[1](x[:, 1].double()).dtype == torch.float64
    layer.float()
    with torch.no_grad():
        assert not layer[1](x[:, 1]).requires_grad
    assert layer[1](x[:, 1]).requires_grad
    layer.requires_grad_(False)
    assert not layer[1](x[:, 1]).requires_grad
    weights = {"weight": torch.zeros(5, 2, 3), "bias": torch.ones(5, 2)}
    assert (
        torch.func.functional_call(Called(layer), {f"layer.{k}": v for k, v in weights.items()}, (x,)) == 1
    ).all()


class Called(torch.nn.Module):
    def __init__(self, layer: LinearList) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(LOOPS["index"](self.layer, x), 1)


@pytest.mark.parametrize(
    "write",
    [
        lambda head: torch.nn.init.constant_(head.weight, 7.0),
        lambda head: head.weight.data.fill_(7),
        lambda head: head.weight.data.copy_(torch.full((2, 3), 7.0)),
        lambda head: torch.no_grad()(lambda: head.weight.fill_(7))(),
    ],
)
def test_writes_in_place_reach_the_stack(write, layer: LinearList, x: Tensor) -> None:
    layer[2](x[:, 2])  # the rows of a call must not be what is written to
    write(layer[2])
    assert (layer.weight[2] == 7).all() and not (layer.weight[1] == 7).any()
    assert torch.equal(layer[2](x[:, 2]), F.linear(x[:, 2], layer.weight[2], layer.bias[2]))


def test_initialisers_see_the_shape_of_one_linear(layer: LinearList) -> None:
    for head in layer:
        torch.nn.init.xavier_uniform_(head.weight)
    bound = (6 / (3 + 2)) ** 0.5
    assert 0.5 * bound < layer.weight.abs().max() <= bound


def test_results_may_be_changed_in_place(layer: LinearList, x: Tensor) -> None:
    outputs = [head(x[:, n]) for n, head in enumerate(layer)]
    for y in outputs:
        y.relu_()
    torch.stack(outputs).sum().backward()
    assert layer.weight.grad is not None


def test_attributes(layer: LinearList) -> None:
    head = layer[-1]
    assert (head.in_features, head.out_features) == (3, 2)
    assert head.weight.data_ptr() == layer.weight[4].data_ptr()
    assert head.bias is not None and head.bias.shape == (2,)
    assert LinearList(3, 2, 5, bias=False)[0].bias is None
    assert repr(head) == "LinearHead(in_features=3, out_features=2, bias=True, index=4)"
    assert [repr(h)[-8:-1] for h in layer[1:4:2]] == ["index=1", "index=3"]
    assert len(layer) == 5 and len(layer[5:]) == 0


@pytest.mark.parametrize("index", [5, -6])
def test_index_out_of_range(index: int, layer: LinearList) -> None:
    with pytest.raises(IndexError, match=f"^LinearList: index {index} is out of range for 5 linears$"):
        layer[index]


def test_wrong_index(layer: LinearList) -> None:
    with pytest.raises(TypeError, match="integer"):
        layer["0"]


@pytest.mark.parametrize("name", ["weight", "bias", "in_features"])
def test_assignment_raises_with_a_hint(name: str, layer: LinearList) -> None:
    hint = (
        f"LinearList: {name} of a head cannot be set, it is a view of the list's; write in place under"
        f" torch.no_grad(), `head.{name}.copy_(…)`, or take `.to_linears()`"
    )
    with pytest.raises(AttributeError) as caught:
        setattr(layer[0], name, torch.nn.Parameter(torch.ones(2, 3)))
    assert str(caught.value) == hint


def test_replacing_a_linear_raises_with_a_hint(layer: LinearList) -> None:
    with pytest.raises(TypeError) as caught:
        layer[1] = torch.nn.Linear(3, 2)
    assert str(caught.value) == (
        "LinearList: a linear cannot be replaced; copy into it under torch.no_grad(),"
        " `self[1].weight.copy_(…)`, or take `.to_linears()`"
    )


@pytest.mark.parametrize(
    "name", ["parameters", "named_parameters", "state_dict", "register_forward_hook", "to"]
)
def test_module_methods_raise_with_a_hint(name: str, layer: LinearList) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(layer[0], name)()
    assert str(caught.value) == (
        f"LinearList: a head has no {name}, its parameters are rows of the list's; use the list"
        " (`list.weight`, `list.parameters()`), or take `.to_linears()`"
    )
    with pytest.raises(AttributeError, match=r"^'LinearHead' object has no attribute 'nonsense'$"):
        layer[0].nonsense  # noqa: B018


def test_heads_copy_with_their_list(layer: LinearList, x: Tensor) -> None:
    pair = (layer, list(layer))
    for other, heads in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        other.weight.data.zero_()
        other.bias.data.fill_(3)
        assert all((head(x[:, 0]) == 3).all() for head in heads)
    assert layer.weight.any()


@pytest.mark.parametrize("kind", ["enumerate", "index", "functional", "slices"])
def test_loops_compile_without_graph_breaks(kind: str, layer: LinearList, x: Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: torch.stack(LOOPS[kind](layer, x), 1), fullgraph=True, backend="aot_eager"
    )
    grads = []
    for function in (compiled, lambda x: torch.stack(LOOPS[kind](layer, x), 1)):
        layer.zero_grad()
        y = function(x)
        y.square().sum().backward()
        grads.append((y, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_loops_in_transforms(layer: LinearList, x: Tensor) -> None:
    def loss(weight: Tensor) -> Tensor:
        parameters = {"layer.weight": weight, "layer.bias": layer.bias}
        return torch.func.functional_call(Called(layer), parameters, (x,)).square().sum()

    grad = torch.func.grad(loss)(layer.weight.detach())
    torch.stack(LOOPS["index"](layer, x), 1).square().sum().backward()
    # float32 identity of two orders of summation
    assert (grad - layer.weight.grad).abs().max() <= 2**-20 * grad.abs().max()


def test_two_losses_through_the_same_rows(layer: LinearList, x: Tensor) -> None:
    first, second = layer[0](x[:, 0]).sum(), layer[1](x[:, 1]).sum()
    first.backward()
    second.backward()
    assert layer.weight.grad[0].any() and layer.weight.grad[1].any() and not layer.weight.grad[2:].any()
    assert all(itertools.starmap(lambda n, g: n > 1 or g.any(), enumerate(layer.bias.grad)))
