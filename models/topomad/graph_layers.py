"""Graph layers that mix neighbouring nodes, in plain PyTorch, and the one place that builds them.

Parameters have the same names, shapes and meaning as in torch-geometric's layers, the other source.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .graph import KINDS, Graph

NEGATIVE_SLOPE = (
    0.2  # of the leaky ReLU on attention scores, as Velickovic et al. and torch-geometric have it
)


def graph_layer(
    source: str,
    kind: str,
    in_features: int,
    out_features: int,
    *,
    heads: int = 1,
    dropout: float = 0.0,
    bias: bool = True,
) -> nn.Module:
    """Build a graph layer, from `source` "own" (here) or "pyg" (torch-geometric).

    "GCN": symmetric normalisation, self-loops of weight 1. "GAT": attention, heads averaged. "WL1":
    GraphConv, neighbours summed. "LIN": every node for itself, the control without a graph.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    attention = {"heads": heads, "dropout": dropout} if kind == "GAT" else {}
    if source == "own":
        own = {"GCN": GraphConvolution, "GAT": GraphAttention, "WL1": NeighbourSum, "LIN": NodeLinear}
        return own[kind](in_features, out_features, bias=bias, **attention)
    if source != "pyg":
        raise ValueError(f"graph_layers must be 'own' or 'pyg', got {source!r}")
    if kind == "LIN":
        return nn.Linear(in_features, out_features, bias=bias)
    try:
        from torch_geometric.nn import GATConv, GCNConv, GraphConv
    except ImportError as error:
        raise ImportError(
            f"mode='paper' takes its {kind} layers from torch-geometric: pip install torch_geometric,"
            " or pass graph_layers='own' for the same layers without it"
        ) from error
    if kind == "GAT":
        return GATConv(in_features, out_features, concat=False, bias=bias, **attention)
    return {"GCN": GCNConv, "WL1": GraphConv}[kind](in_features, out_features, bias=bias)


def batch_edges(edge_index: Tensor, num_nodes: int, batch_size: int) -> Tensor:
    """Repeat a graph for every window of a batch: (2, E) -> (2, B * E), window b's nodes from b * N on."""
    offsets = torch.arange(batch_size, device=edge_index.device) * num_nodes
    return (edge_index[:, None, :] + offsets[:, None]).flatten(1)


class NodeLinear(nn.Linear):
    """One linear for every node by itself: x (N, *, I) -> (N, *, O)."""

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        return super().forward(x)


class GraphConvolution(nn.Module):
    """Kipf and Welling's layer, torch-geometric's GCNConv: `A_hat x W^T + b`; x (N, *, I) -> (N, *, O)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        self.lin = nn.Linear(in_features, out_features, bias=False)
        nn.init.xavier_uniform_(self.lin.weight)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        return F.linear(graph.neighbours(x), self.lin.weight, self.bias)


class NeighbourSum(nn.Module):
    """Morris et al.'s 1-WL layer, torch-geometric's GraphConv: `A x W_rel^T + b + x W_root^T`."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        self.lin_rel = nn.Linear(in_features, out_features, bias=bias)
        self.lin_root = nn.Linear(in_features, out_features, bias=False)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        return self.lin_rel(graph.neighbours(x)) + self.lin_root(x)


class GraphAttention(nn.Module):
    """Velickovic et al.'s layer with averaged heads, torch-geometric's GATConv: x (N, *, I) -> (N, *, O).

    Head k weighs the edge from j to i by softmax over i's edges of leaky_relu(att_src_k . W_k x_j +
    att_dst_k . W_k x_i). Since the heads are averaged, the I features are summed over the edges first and
    transformed once afterwards: `mean_k (sum_j alpha_ijk x_j) W_k^T`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        heads: int = 1,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.lin = nn.Linear(in_features, heads * out_features, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_features))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        nn.init.xavier_uniform_(self.lin.weight)
        for attention in (self.att_src, self.att_dst):
            bound = math.sqrt(6 / (heads + out_features))
            nn.init.uniform_(attention, -bound, bound)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        by_head = self.lin.weight.unflatten(0, (self.heads, -1))
        score_src = x @ torch.einsum("koi,ko->ik", by_head, self.att_src[0])
        score_dst = x @ torch.einsum("koi,ko->ik", by_head, self.att_dst[0])
        summed = attend(x, score_src, score_dst, graph, self.dropout if self.training else 0.0)
        weight = by_head.transpose(0, 1).flatten(1) / self.heads
        return F.linear(summed.flatten(-2), weight, self.bias)


def attend(x: Tensor, score_src: Tensor, score_dst: Tensor, graph: Graph, dropout: float) -> Tensor:
    """Sum x over each node's edges by attention: x (N, *, I), scores (N, *, K) -> (N, *, K, I)."""
    source, target, num_nodes = graph.source, graph.target, graph.num_nodes
    score = F.leaky_relu(score_src[source] + score_dst[target], NEGATIVE_SLOPE)
    index = target.view(-1, *[1] * (score.dim() - 1)).expand_as(score)
    largest = score.detach().new_zeros(num_nodes, *score.shape[1:])
    largest.scatter_reduce_(0, index, score.detach(), "amax", include_self=False)
    weight = (score - largest[target]).exp()
    total = torch.zeros_like(largest).index_add(0, target, weight)
    weight = F.dropout(weight / total[target], dropout)
    message = weight[..., None] * x[source][..., None, :]
    return x.new_zeros(num_nodes, *message.shape[1:]).index_add(0, target, message)
