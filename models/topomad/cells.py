"""The graph-LSTM: an LSTM cell whose gates come from a graph layer, and stacks of such cells over time."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .graph import Graph
from .graph_layers import graph_layer
from .recurrence import GraphLSTMFunction

LINEAR_KINDS = ("GCN", "WL1", "LIN")


class State(NamedTuple):
    """What an LSTM cell carries from one time step to the next: h and c, each (B, N, H)."""

    h: Tensor
    c: Tensor


class GraphLSTMCell(nn.Module):
    """One LSTM step of every node of every window; the gates i, f, o, g come from one graph layer.

    Args:
        kind: "GCN", "GAT", "WL1" or "LIN".
        in_features: features of a node's input.
        hidden_features: H.
        heads, dropout: of the attention, for "GAT" only.
        bias: whether the graph layer adds one.
        graph_layers: where the graph layer comes from, "own" or "pyg".
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
        graph_layers: str = "own",
    ) -> None:
        super().__init__()
        self.kind, self.graph_layers = kind, graph_layers
        settings = {"heads": heads, "dropout": dropout, "bias": bias}
        self.gconv = graph_layer(
            graph_layers, kind, in_features + hidden_features, 4 * hidden_features, **settings
        )

    def forward(self, x: Tensor, state: State, graph: Graph | Tensor) -> State:
        """x (B, N, I), state of (B, N, H) -> next state.

        graph: a `Graph`; for torch-geometric's layers (2, B * E) as `batch_edges` gives.
        """
        i, f, o, g = self._gates(torch.cat([x, state.h], dim=-1), graph).chunk(4, dim=-1)
        c = torch.sigmoid(f) * state.c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return State(h, c)

    def _gates(self, x: Tensor, graph: Graph | Tensor) -> Tensor:
        if self.graph_layers == "own":
            return self.gconv(x.transpose(0, 1), graph).transpose(0, 1)
        if self.kind == "LIN":
            return self.gconv(x)
        return self.gconv(x.flatten(0, 1), graph).unflatten(0, x.shape[:2])


class GraphLSTM(nn.Module):
    """Cells stacked on each other, run over a sequence; each cell's h is the next one's input.

    Args: those of `GraphLSTMCell`, and
        num_layers: L, the number of cells.
        fused: run all layers and time steps through `GraphLSTMFunction` where `kind` allows it, instead of
            cell by cell; the numbers are the same but for rounding. Needs `graph_layers="own"`.
    """

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
        graph_layers: str = "own",
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.kind, self.hidden_features = kind, hidden_features
        self.fused = fused and kind in LINEAR_KINDS
        settings = {"heads": heads, "dropout": dropout, "bias": bias, "graph_layers": graph_layers}
        sizes = [in_features] + [hidden_features] * (num_layers - 1)
        self.cell_list = nn.ModuleList(
            GraphLSTMCell(kind, size, hidden_features, **settings) for size in sizes
        )

    def forward(
        self, sequence: Tensor, states: list[State], graph: Graph | Tensor
    ) -> tuple[Tensor, list[State]]:
        """sequence (T, B, N, I) in the order to be read, one state per cell -> top h (T, B, N, H), states."""
        if len(sequence) == 0:
            return sequence.new_zeros(*sequence.shape[:-1], self.hidden_features), states
        if self.fused:
            return self._forward_fused(sequence, states, graph)
        states = list(states)
        top = []
        for x in sequence:
            for k, cell in enumerate(self.cell_list):
                states[k] = cell(x, states[k], graph)
                x = states[k].h
            top.append(x)
        return torch.stack(top), states

    def _forward_fused(
        self, sequence: Tensor, states: list[State], graph: Graph
    ) -> tuple[Tensor, list[State]]:
        size = self.hidden_features
        windows_last = sequence.permute(0, 2, 3, 1).contiguous()
        biases = self._biases()
        terms = [self._weights(name) for name in self._terms()]
        first = None
        for mix, blocks in terms:
            x = self._neighbours(windows_last, graph) if mix else windows_last
            part = blocks[0][:, :-size] @ x
            first = part if first is None else first + part
        later = None
        if biases is not None:
            first = first + biases[0][:, None]
            if len(biases) > 1:
                later = torch.stack([bias.view(4, size) for bias in biases[1:]], dim=1)
        h = torch.stack([state.h.permute(1, 2, 0) for state in states], dim=1)
        c = torch.stack([state.c.permute(1, 2, 0) for state in states], dim=1)
        mixes = tuple(mix for mix, _ in terms)
        recurrent = [self._block_triangular(blocks) for _, blocks in terms]
        top, h, c = GraphLSTMFunction.apply(
            first.unflatten(2, (4, size)), later, h, c, graph, mixes, *recurrent
        )
        by_layer = zip(h.permute(1, 3, 0, 2), c.permute(1, 3, 0, 2), strict=True)
        return top.permute(0, 3, 1, 2), [State(h_k, c_k) for h_k, c_k in by_layer]

    @staticmethod
    def _neighbours(x: Tensor, graph: Graph) -> Tensor:
        """Sum over neighbours at every time step: x (T, N, I, B) -> (T, N, I, B)."""
        return graph.neighbours(x.transpose(0, 1).contiguous()).transpose(0, 1)

    def _terms(self) -> tuple[str, ...]:
        return {"GCN": ("lin",), "WL1": ("lin_rel", "lin_root"), "LIN": ("",)}[self.kind]

    def _weights(self, name: str) -> tuple[bool, list[Tensor]]:
        """Whether this weight of each cell takes the sum over neighbours, and the weights (4 * H, I + H)."""
        mixes = name in ("lin", "lin_rel")
        return mixes, [cell.gconv.get_submodule(name).weight for cell in self.cell_list]

    def _biases(self) -> list[Tensor] | None:
        layers = [cell.gconv.lin_rel if self.kind == "WL1" else cell.gconv for cell in self.cell_list]
        return None if layers[0].bias is None else [layer.bias for layer in layers]

    def _block_triangular(self, blocks: list[Tensor]) -> Tensor:
        """Put the cells' weights (4 * H, I + H) into one (4 * L * H, L * H): layer k reads k - 1 and k."""
        size, layers = self.hidden_features, len(blocks)
        if layers == 1:
            return blocks[0][:, -size:].contiguous()
        rows = [F.pad(blocks[0][:, -size:], (0, (layers - 1) * size))]
        for k in range(1, layers):
            rows.append(F.pad(blocks[k], ((k - 1) * size, (layers - 1 - k) * size)))
        return torch.stack([row.unflatten(0, (4, size)) for row in rows], dim=1).flatten(0, 2)
