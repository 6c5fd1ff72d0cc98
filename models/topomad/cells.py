"""The graph-LSTM: an LSTM cell whose gates come from a graph layer, and stacks of such cells over time."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

KINDS = ("GCN", "GAT", "WL1", "LIN")


class State(NamedTuple):
    """What an LSTM cell carries from one time step to the next: h and c, each (B, N, H)."""

    h: Tensor
    c: Tensor


def pyg_graph_layer(
    kind: str, in_features: int, out_features: int, *, heads: int = 1, dropout: float = 0.0, bias: bool = True
) -> nn.Module:
    """Build the layer that mixes neighbouring nodes: torch-geometric's, or a plain Linear for "LIN".

    "GCN": symmetric normalisation, self-loops of weight 1. "GAT": attention, heads averaged. "WL1":
    GraphConv, neighbours summed. "LIN": every node for itself, the control without a graph.
    """
    if kind == "LIN":
        return nn.Linear(in_features, out_features, bias=bias)
    try:
        from torch_geometric.nn import GATConv, GCNConv, GraphConv
    except ImportError as error:
        raise ImportError(
            f"mode='paper' takes its {kind} layers from torch-geometric: pip install torch_geometric,"
            " or pass graph_layers='own' for the same layers without it"
        ) from error
    if kind == "GCN":
        return GCNConv(in_features, out_features, bias=bias)
    if kind == "GAT":
        return GATConv(in_features, out_features, heads=heads, concat=False, dropout=dropout, bias=bias)
    if kind == "WL1":
        return GraphConv(in_features, out_features, bias=bias)
    raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")


def batch_edges(edge_index: Tensor, num_nodes: int, batch_size: int) -> Tensor:
    """Repeat a graph for every window of a batch: (2, E) -> (2, B * E), window b's nodes from b * N on."""
    offsets = torch.arange(batch_size, device=edge_index.device) * num_nodes
    return (edge_index[:, None, :] + offsets[:, None]).flatten(1)


class GraphLSTMCell(nn.Module):
    """One LSTM step of every node of every window; the gates i, f, o, g come from one graph layer.

    Args:
        kind: "GCN", "GAT", "WL1" or "LIN".
        in_features: features of a node's input.
        hidden_features: H.
        heads, dropout: of the attention, for "GAT" only.
        bias: whether the graph layer adds one.
    """

    def __init__(
        self,
        kind: str,
        in_features: int,
        hidden_features: int,
        *,
        heads: int = 1,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.gconv = pyg_graph_layer(
            kind, in_features + hidden_features, 4 * hidden_features, heads=heads, dropout=dropout, bias=bias
        )

    def forward(self, x: Tensor, state: State, batched_edges: Tensor) -> State:
        """x (B, N, I), state of (B, N, H), batched_edges (2, B * E) as `batch_edges` gives -> next state."""
        combined = torch.cat([x, state.h], dim=-1)
        if self.kind == "LIN":
            gates = self.gconv(combined)
        else:
            gates = self.gconv(combined.flatten(0, 1), batched_edges).unflatten(0, x.shape[:2])
        i, f, o, g = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * state.c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return State(h, c)


class GraphLSTM(nn.Module):
    """Cells stacked on each other, run over a sequence; each cell's h is the next one's input."""

    def __init__(
        self,
        kind: str,
        in_features: int,
        hidden_features: int,
        num_layers: int,
        *,
        heads: int = 1,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        sizes = [in_features] + [hidden_features] * (num_layers - 1)
        self.cell_list = nn.ModuleList(
            GraphLSTMCell(kind, size, hidden_features, heads=heads, dropout=dropout, bias=bias)
            for size in sizes
        )

    def forward(
        self, sequence: Tensor, states: list[State], batched_edges: Tensor
    ) -> tuple[Tensor, list[State]]:
        """sequence (T, B, N, I) in the order to be read, one state per cell -> top h (T, B, N, H), states."""
        states = list(states)
        top = []
        for x in sequence:
            for k, cell in enumerate(self.cell_list):
                states[k] = cell(x, states[k], batched_edges)
                x = states[k].h
            top.append(x)
        return torch.stack(top), states
