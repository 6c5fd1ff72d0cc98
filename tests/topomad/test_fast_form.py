"""The fast form of the model is the plain form: outputs, loss, gradients and whole training curves."""

import copy

import pytest
import torch
from sensitivity import one_ulp_envelope

from fastlayers.equivalence import assert_as_accurate
from models.topomad import GraphLSTMVAE
from models.topomad.graph import Graph

KINDS = ("GCN", "GAT", "WL1", "LIN")
PLAIN = {"fused": False, "node_heads": "list"}
SPARSE = torch.stack([torch.arange(40), (torch.arange(40) * 7 + 1) % 40])
DENSE = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 0]])


def build(kind, form, num_nodes=5, **settings):
    heads = (2, 3) if kind == "GAT" else (1, 1)
    return GraphLSTMVAE(kind, num_nodes, 4, 3, heads=heads, **settings, **form)


def twins(kind, num_nodes=5, dtype=torch.float32, **settings):
    plain = build(kind, PLAIN, num_nodes, **settings).to(dtype)
    fast = build(kind, {}, num_nodes, **settings).to(dtype)
    fast.load_state_dict(plain.state_dict())
    return plain, fast


def in_list_names(model, gradients):
    """Give the gradients of stacked heads under the names of the linears they stand for."""
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in holder.named_parameters():
            parameter.copy_(gradients[name])
    return holder.list_state_dict()


def numbers(model, windows, edges, eps, use_teacher_forcing=True):
    windows = windows.clone().requires_grad_()
    result = model(windows, edges, use_teacher_forcing, eps=eps.to(windows.dtype))
    loss = model.loss(windows, result)
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, [windows, *named.values()])
    by_name = in_list_names(model, dict(zip(named, grads[1:], strict=True)))
    outputs = {f"output {k}": tensor.detach() for k, tensor in enumerate(result)}
    return outputs | {"loss": loss.detach(), "windows": grads[0]} | by_name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edges", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("forced", [True, False])
def test_outputs_loss_and_gradients(kind, edges, forced):
    torch.manual_seed(0)
    num_nodes = int(edges.max()) + 1
    plain, fast = twins(kind, num_nodes)
    windows, eps = torch.randn(3, 4, num_nodes, 4), torch.randn(3, num_nodes, 3)
    reference, envelope = one_ulp_envelope(
        plain, windows, lambda model, moved: numbers(model, moved, edges, eps, forced)
    )
    original = numbers(plain, windows, edges, eps, forced)
    result = numbers(fast, windows, edges, eps, forced)
    assert set(result) == set(original)
    for name, tensor in result.items():
        assert_as_accurate(tensor, original[name], reference[name], envelope=envelope[name], name=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bias", [(True, False), (False, True)])
@pytest.mark.parametrize("variational", [True, False])
@pytest.mark.parametrize("mode", ["default", "paper"])
def test_every_setting_in_float64(kind, layers, bias, variational, mode):
    torch.manual_seed(1)
    settings = {"num_layers": (layers, layers), "bias": bias, "variational": variational, "mode": mode}
    own = {"graph_layers": "own"}
    plain = build(kind, PLAIN | own, **settings).double()
    fast = build(kind, {"fused": True, "node_heads": "stacked"} | own, **settings).double()
    fast.load_state_dict(plain.state_dict())
    windows, eps = torch.randn(3, 5, 5, 4, dtype=torch.float64), torch.randn(3, 5, 3)
    for forced in (True, False):
        original, result = (numbers(model, windows, DENSE, eps, forced) for model in (plain, fast))
        for name, tensor in result.items():
            assert (tensor - original[name]).abs().max() <= 1e-12 * original[name].abs().max() + 1e-15, name


@pytest.mark.parametrize("kind", KINDS)
def test_own_graph_layers_are_torch_geometrics(kind):
    pytest.importorskip("torch_geometric", reason="compares with torch-geometric's layers")
    torch.manual_seed(2)
    edges = torch.tensor([[0, 1, 2, 3, 4, 0, 3], [1, 2, 3, 4, 0, 2, 3]])
    theirs = build(kind, {}, mode="paper").double()
    ours = build(kind, PLAIN | {"graph_layers": "own"}, mode="paper").double()
    ours.load_state_dict(theirs.state_dict())
    windows, eps = torch.randn(3, 5, 5, 4, dtype=torch.float64), torch.randn(3, 5, 3)
    original, result = (numbers(model, windows, edges, eps) for model in (theirs, ours))
    for name, tensor in result.items():
        assert (tensor - original[name]).abs().max() <= 1e-12 * original[name].abs().max() + 1e-15, name


@pytest.mark.parametrize("kind", KINDS)
def test_training_curves_agree(kind):
    torch.manual_seed(3)
    plain, fast = twins(kind, dtype=torch.float64)
    series = torch.randn(60, 5, 4, dtype=torch.float64).cumsum(0) / 5
    starts = torch.randint(0, 56, (50, 4))
    noise = torch.randn(50, 4, 5, 3, dtype=torch.float64)
    curves = [train(model, series, starts, noise) for model in (plain, fast)]
    assert curves[0][-1] < curves[0][0]
    for a, b in zip(*curves, strict=True):
        assert abs(a - b) <= 1e-8 * abs(a)


def train(model, series, starts, noise):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for first, eps in zip(starts, noise, strict=True):
        windows = series[first[:, None] + torch.arange(4)]
        loss = model.loss(windows, model(windows, DENSE, eps=eps))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("variational", [True, False])
def test_state_dicts_go_both_ways(variational):
    plain, fast = twins("GCN", variational=variational)
    listed = fast.list_state_dict()
    assert set(listed) == set(plain.state_dict())
    assert all(torch.equal(listed[key], tensor) for key, tensor in plain.state_dict().items())
    again = build("GCN", {}, variational=variational)
    again.load_state_dict(fast.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), fast.parameters(), strict=True))
    incomplete = {key: tensor for key, tensor in listed.items() if key != "hidden2output.2.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key.*output_heads\.weight"):
        fast.load_state_dict(incomplete)


def test_a_prepared_graph_is_checked_and_gives_the_same_numbers():
    _, model = twins("GCN")
    windows, eps = torch.randn(2, 4, 5, 4), torch.randn(2, 5, 3)
    graph = model.prepare_graph(DENSE)
    assert torch.equal(model(windows, graph, eps=eps)[0], model(windows, DENSE, eps=eps)[0])
    with pytest.raises(ValueError, match="a graph for GCN with 5 nodes, got one for LIN with 5"):
        model(windows, Graph.prepare("LIN", DENSE, 5))
    with pytest.raises(ValueError, match="edge_index must name nodes from 0 to 4, got 0 to 5"):
        model.prepare_graph(torch.tensor([[0, 5], [1, 0]]))
    with pytest.raises(ValueError, match="torch-geometric's layers take edge_index itself"):
        build("LIN", {}, mode="paper").prepare_graph(DENSE)


def test_attention_dropout_drops_edges_in_training_only():
    torch.manual_seed(4)
    model = GraphLSTMVAE("GAT", 5, 4, 3, heads=(2, 2), dropout=(0.5, 0.5))
    windows, eps = torch.randn(2, 4, 5, 4), torch.randn(2, 5, 3)
    assert not torch.equal(model(windows, DENSE, eps=eps)[0], model(windows, DENSE, eps=eps)[0])
    model.eval()
    assert torch.equal(model(windows, DENSE, eps=eps)[0], model(windows, DENSE, eps=eps)[0])
