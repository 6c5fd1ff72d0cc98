"""A graph prepared once for a kind of graph layer: normalised, with its self-loops, dense or sparse."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("GCN", "GAT", "WL1", "LIN")
# A dense product beats a sparse one while the matrix has at most this many elements per edge (one thread,
# AVX-512: 50 nodes and 800 edges 2.5 times faster, 100 nodes and 500 edges even, 200 and 1000 half as fast).
DENSE_ELEMENTS_PER_EDGE = 18


@dataclass(frozen=True)
class Graph:
    """What a graph layer of `kind` needs to know of a graph of `num_nodes` nodes.

    matrix, transposed: (N, N), row = target node, dense or CSR; None for "GAT" and "LIN".
        "GCN": D^-1/2 (A + I) D^-1/2, a node's own weight 1; "WL1": A, repeated edges counted.
    source, target: (E,) edges in order of their target, every node's self-loop among them, for "GAT".
    """

    kind: str
    num_nodes: int
    matrix: Tensor | None = None
    transposed: Tensor | None = None
    source: Tensor | None = None
    target: Tensor | None = None

    @staticmethod
    def prepare(kind: str, edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float32) -> "Graph":
        """Prepare edge_index (2, E), source and target of each edge, on its device.

        Raises:
            ValueError: an unknown kind, another shape, or a node beyond `num_nodes`.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        check_edges(edge_index, num_nodes)
        edge_index = edge_index.long()
        if kind == "LIN":
            return Graph(kind, num_nodes)
        if kind == "WL1":
            source, target = edge_index
            weight = torch.ones(source.shape, dtype=torch.float64, device=source.device)
            return Graph(kind, num_nodes, *_matrices(source, target, weight, num_nodes, dtype))
        source, target = _with_self_loops(edge_index, num_nodes)
        if kind == "GAT":
            order = torch.argsort(target, stable=True)
            return Graph(kind, num_nodes, source=source[order], target=target[order])
        degree = torch.zeros(num_nodes, dtype=torch.float64, device=target.device)
        degree.index_add_(0, target, torch.ones_like(target, dtype=torch.float64))
        weight = (degree[source] * degree[target]).rsqrt()
        return Graph(kind, num_nodes, *_matrices(source, target, weight, num_nodes, dtype))

    def neighbours(self, x: Tensor) -> Tensor:
        """Sum over each node's neighbours, x (N, ...) -> (N, ...); differentiable in x."""
        return _Product.apply(x, self.matrix, self.transposed)


def check_edges(edge_index: Tensor, num_nodes: int) -> None:
    """Raise ValueError unless edge_index is (2, E) and names nodes below `num_nodes` only."""
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index must be (2, E), got {tuple(edge_index.shape)}")
    if edge_index.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < num_nodes:
        raise ValueError(
            f"edge_index must name nodes from 0 to {num_nodes - 1}, got {int(edge_index.min())} to"
            f" {int(edge_index.max())}"
        )


def _with_self_loops(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Give every node exactly one self-loop."""
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    nodes = torch.arange(num_nodes, device=edge_index.device)
    return torch.cat([source, nodes]), torch.cat([target, nodes])


def _matrices(
    source: Tensor, target: Tensor, weight: Tensor, num_nodes: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = (num_nodes, num_nodes)
    indices = torch.stack([target, source])
    sparse = torch.sparse_coo_tensor(indices, weight, shape, check_invariants=True).coalesce()
    if num_nodes * num_nodes <= DENSE_ELEMENTS_PER_EDGE * max(sparse.values().numel(), 1):
        dense = sparse.to_dense().to(dtype)
        return dense, dense.t().contiguous()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return (sparse.to(dtype).to_sparse_csr(), sparse.t().coalesce().to(dtype).to_sparse_csr())


class _Product(torch.autograd.Function):
    """matrix @ x over the first dimension; its gradient is the product with the transposed matrix."""

    @staticmethod
    def forward(ctx, x: Tensor, matrix: Tensor, transposed: Tensor) -> Tensor:
        ctx.transposed = transposed
        return (matrix @ x.flatten(1)).view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.transposed @ grad.flatten(1)).view(grad.shape), None, None
