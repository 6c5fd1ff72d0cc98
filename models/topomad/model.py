"""GraphLSTMVAE: a sequence-to-sequence variational autoencoder over the metrics of all nodes of a graph.

He et al., "A Spatiotemporal Deep Learning Approach for Unsupervised Anomaly Detection in Cloud Systems",
IEEE TNNLS 34(4), 2023, doi 10.1109/TNNLS.2020.3027736.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastlayers import LinearList

from .cells import GraphLSTM, State
from .graph import KINDS, Graph
from .graph_layers import batch_edges

_PAIRS = {"latent_heads": ("mu", "logvar"), "output_heads": ("hidden2output", "hidden2output_logvar")}


@dataclass(frozen=True)
class Options:
    """What a mode decides.

    graph_layers: "pyg" (torch-geometric) or "own".
    fused: run all layers and time steps of the encoder, and of the decoder, as one function.
    node_heads: "list", a ModuleList of one Linear per node, or "stacked", LinearLists that give mean and
        log-variance together.
    latent_to_decoder: whether the decoder starts from the latent vector instead of the encoder's states.
    std_is_exp_logvar: the latent noise has standard deviation exp(logvar), although the loss takes
        exp(logvar) for the variance, as the authors have it; otherwise exp(logvar / 2).
    logvar_bounds: lowest and highest log-variance of an output, or None.
    """

    graph_layers: str
    fused: bool
    node_heads: str
    latent_to_decoder: bool
    std_is_exp_logvar: bool
    logvar_bounds: tuple[float, float] | None


MODES = {
    "paper": Options("pyg", False, "list", False, True, None),
    "default": Options("own", True, "stacked", True, False, (-3.0, 3.0)),
}


class GraphLSTMVAE(nn.Module):
    """Encode windows of node metrics into one latent vector per node, and decode them backwards in time.

    Each node has its own small linears: `mu` and `logvar` from the encoder's last h to the latent vector,
    `hidden2output` and `hidden2output_logvar` from a decoder state to the metrics. Names and shapes of all
    parameters are those of the authors' checkpoints; with stacked heads, `load_state_dict` takes those names
    and `list_state_dict` gives them.

    Args:
        kind: of the graph layers: "GCN", "GAT", "WL1" or "LIN" (no graph).
        num_nodes: N.
        in_features: M, metrics of a node.
        hidden_features: H, of the states and of the latent vector.
        num_layers: cells of the encoder and of the decoder; equal, for the decoder starts in the encoder's
            states.
        heads, dropout: of the attention in the encoder and in the decoder, for "GAT".
        bias: of the encoder's cells; of the decoder's cells and of the linears.
        variational: False leaves out `mu`, `logvar` and `hidden2output_logvar`: a plain autoencoder.
        mode: "default", or "paper" for exactly the authors' model; a preset of `Options`.
        options: single options that differ from the mode's, by their names.

    Raises:
        ValueError: an unknown kind or mode, a size below 1, or unequal numbers of layers.
    """

    def __init__(
        self,
        kind: str,
        num_nodes: int,
        in_features: int,
        hidden_features: int,
        *,
        num_layers: tuple[int, int] = (2, 2),
        heads: tuple[int, int] = (1, 1),
        dropout: tuple[float, float] = (0.0, 0.0),
        bias: tuple[bool, bool] = (True, True),
        variational: bool = True,
        mode: str = "default",
        **options: Any,
    ) -> None:
        super().__init__()
        _check_sizes(kind, num_nodes, in_features, hidden_features, num_layers)
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        self.options = replace(MODES[mode], **options)
        if self.options.fused and self.options.graph_layers != "own":
            raise ValueError("fused=True needs graph_layers='own', got 'pyg'")
        if self.options.node_heads not in ("list", "stacked"):
            raise ValueError(f"node_heads must be 'list' or 'stacked', got {self.options.node_heads!r}")
        self.kind, self.variational = kind, variational
        self.num_nodes, self.in_features, self.hidden_features = num_nodes, in_features, hidden_features

        def stack(k: int) -> GraphLSTM:
            settings = {"heads": heads[k], "dropout": dropout[k], "bias": bias[k]}
            layers = {"graph_layers": self.options.graph_layers, "fused": self.options.fused}
            return GraphLSTM(kind, in_features, hidden_features, num_layers[k], **settings, **layers)

        def linears(out_features: int) -> nn.ModuleList:
            one_per_node = (nn.Linear(hidden_features, out_features, bias=bias[1]) for _ in range(num_nodes))
            return nn.ModuleList(one_per_node)

        self.encoder = stack(0)
        self.decoder = stack(1)
        if self.options.node_heads == "stacked":
            if variational:
                self.latent_heads = LinearList(hidden_features, 2 * hidden_features, num_nodes, bias[1])
            out_features = in_features * (2 if variational else 1)
            self.output_heads = LinearList(hidden_features, out_features, num_nodes, bias[1])
        else:
            if variational:
                self.mu = linears(hidden_features)
                self.logvar = linears(hidden_features)
                self.hidden2output_logvar = linears(in_features)
            self.hidden2output = linears(in_features)

    def deal_list(self, module_list: nn.ModuleList, x: Tensor) -> Tensor:
        """Apply each node's own module to that node: x (B, N, I) -> (B, N, O)."""
        x = x.permute(1, 0, 2)
        outputs = []
        for i, module in enumerate(module_list):
            outputs.append(module(x[i]))
        return torch.stack(outputs, dim=1)

    def forward(
        self,
        windows: Tensor,
        edge_index: Tensor | Graph,
        use_teacher_forcing: bool = True,
        *,
        eps: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Reconstruct windows of metrics.

        Args:
            windows: (B, T, N, M).
            edge_index: (2, E), source and target node of each edge, one graph for all windows; or what
                `prepare_graph` made of it, which saves doing so at each call.
            use_teacher_forcing: in training mode, let the decoder read the true following time step instead
                of its own output. In eval mode it always reads its own output.
            eps: (B, N, H), the standard normal noise of the latent vector; drawn where None.

        Returns:
            output (B, T, N, M), enc_hidden (B, N, H: the latent vector where variational, else the encoder's
            last h) and, where variational, mu, logvar (B, N, H) and output_logvar (B, T, N, M).
        """
        self._check(windows, edge_index)
        graph = self._graph(windows, edge_index)
        sequence = windows.transpose(0, 1)
        latent, states, moments = self.encode(sequence, graph, eps)

        # The latent vector gives the last time step; from there the decoder walks backwards in time.
        if self.training and use_teacher_forcing:
            decoded, _ = self.decoder(sequence[1:].flip(0), states, graph)
            emitted = self.emit(torch.cat([latent[None], decoded]))
        else:
            steps = [self.emit(latent[None])]
            for _ in range(windows.shape[1] - 1):
                decoded, states = self.decoder(steps[-1][0], states, graph)
                steps.append(self.emit(decoded))
            emitted = tuple(torch.cat(parts) for parts in zip(*steps, strict=True))
        output, *output_logvar = (tensor.flip(0).transpose(0, 1) for tensor in emitted)
        return output, latent, *moments, *output_logvar

    def encode(
        self, sequence: Tensor, graph: Graph | Tensor, eps: Tensor | None = None
    ) -> tuple[Tensor, list[State], tuple[Tensor, ...]]:
        """Encode (T, B, N, M): the latent vector (B, N, H), the decoder's first states, and (mu, logvar)."""
        latent, states, moments = self._run_encoder(sequence, graph)
        if self.variational:
            mu, logvar = moments
            noise = torch.randn_like(mu) if eps is None else eps
            latent = mu + noise * torch.exp(logvar if self.options.std_is_exp_logvar else logvar / 2)
        if self.options.latent_to_decoder:
            states = [State(torch.tanh(latent), latent)] * len(states)
        return latent, states, moments

    def encode_moments(self, sequence: Tensor, graph: Graph | Tensor) -> tuple[Tensor, ...]:
        """Encode (T, B, N, M): mu and logvar of the latent vector, (B, N, H); () if not variational."""
        return self._run_encoder(sequence, graph)[2]

    def _run_encoder(
        self, sequence: Tensor, graph: Graph | Tensor
    ) -> tuple[Tensor, list[State], tuple[Tensor, ...]]:
        zeros = sequence.new_zeros(sequence.shape[1], self.num_nodes, self.hidden_features)
        start = [State(zeros, zeros)] * len(self.encoder.cell_list)
        encoded, states = self.encoder(sequence, start, graph)
        if not self.variational:
            return encoded[-1], states, ()
        if self.options.node_heads == "stacked":
            mu, logvar = self.latent_heads(encoded[-1]).chunk(2, dim=-1)
        else:
            mu, logvar = self.deal_list(self.mu, encoded[-1]), self.deal_list(self.logvar, encoded[-1])
        return encoded[-1], states, (mu, logvar)

    def loss(
        self,
        windows: Tensor,
        result: tuple[Tensor, ...],
        *,
        observed: Tensor | None = None,
        kl_weight: float = 1.0,
    ) -> Tensor:
        """Give the training loss of what `forward` returned for `windows`, a scalar.

        Variational: the Gaussian negative log-likelihood, without its constant, plus `kl_weight` times the
        divergence of the latent vector from a standard normal, each summed over a window and averaged over
        the batch. Otherwise the mean squared error. What is not `observed` (a mask of windows' shape) counts
        nothing.
        """
        error = (windows - result[0]).square()
        if not self.variational:
            if observed is None:
                return error.mean()
            return (error * observed).sum() / observed.sum().clamp(min=1)
        _, _, mu, logvar, output_logvar = result
        surprise = error * torch.exp(-output_logvar) + output_logvar
        if observed is not None:
            surprise = surprise * observed
        divergence = mu.square() + logvar.exp() - logvar - 1
        return (0.5 * surprise.sum() + 0.5 * kl_weight * divergence.sum()) / windows.shape[0]

    def prepare_graph(self, edge_index: Tensor) -> Graph:
        """Prepare edge_index (2, E) once, for `forward`; in the dtype of the parameters, on their device.

        Raises:
            ValueError: with torch-geometric's layers, which take edge_index itself; a node that is not there.
        """
        if self.options.graph_layers != "own":
            raise ValueError("prepare_graph: torch-geometric's layers take edge_index itself")
        parameter = next(self.parameters())
        return Graph.prepare(self.kind, edge_index.to(parameter.device), self.num_nodes, parameter.dtype)

    def _graph(self, windows: Tensor, edge_index: Tensor | Graph) -> Graph | Tensor:
        if isinstance(edge_index, Graph):
            return edge_index
        if self.options.graph_layers == "own":
            return self.prepare_graph(edge_index)
        return batch_edges(edge_index, self.num_nodes, windows.shape[0])

    def emit(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Map h (T, B, N, H) to the metrics' mean and, where variational, log-variance: (T, B, N, M) each."""
        if self.options.node_heads == "stacked":
            emitted = self.output_heads(hidden)
            if not self.variational:
                return (emitted,)
            output, logvar = emitted.chunk(2, dim=-1)
        else:
            output = torch.stack([self.deal_list(self.hidden2output, h) for h in hidden])
            if not self.variational:
                return (output,)
            logvar = torch.stack([self.deal_list(self.hidden2output_logvar, h) for h in hidden])
        if self.options.logvar_bounds is not None:
            low, high = self.options.logvar_bounds
            middle, half = (low + high) / 2, (high - low) / 2
            logvar = torch.tanh(logvar / half) * half + middle
        return output, logvar

    def list_state_dict(self) -> dict[str, Tensor]:
        """Give the state dict in the authors' names, one Linear per node, whatever form the heads have."""
        state = {}
        for key, tensor in self.state_dict().items():
            owner, _, name = key.partition(".")
            if owner not in _PAIRS or self.options.node_heads != "stacked":
                state[key] = tensor
                continue
            lists = _PAIRS[owner] if self.variational else _PAIRS[owner][:1]
            for part, half in zip(lists, tensor.chunk(len(lists), dim=1), strict=True):
                state |= {f"{part}.{n}.{name}": half[n].clone() for n in range(self.num_nodes)}
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        if self.options.node_heads == "stacked":
            self._stack_lists(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _stack_lists(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Put the keys of whole lists, `mu.0.weight` and so on, together under the stacked names."""
        for owner, lists in _PAIRS.items():
            lists = lists if self.variational else lists[:1]
            for name in ("weight", "bias"):
                keys = [[f"{prefix}{part}.{n}.{name}" for n in range(self.num_nodes)] for part in lists]
                if hasattr(self, owner) and all(key in state_dict for part in keys for key in part):
                    halves = [torch.stack([state_dict.pop(key) for key in part]) for part in keys]
                    state_dict[f"{prefix}{owner}.{name}"] = torch.cat(halves, dim=1)

    def _check(self, windows: Tensor, edge_index: Tensor | Graph) -> None:
        expected = (self.num_nodes, self.in_features)
        if windows.dim() != 4 or windows.shape[2:] != expected or windows.shape[1] < 1:
            raise ValueError(
                f"windows must be (batch, time, node, metric) = (*, *, {expected[0]}, {expected[1]}),"
                f" got {tuple(windows.shape)}"
            )
        if isinstance(edge_index, Graph):
            if (edge_index.kind, edge_index.num_nodes) != (self.kind, self.num_nodes):
                raise ValueError(
                    f"edge_index must be a graph for {self.kind} with {self.num_nodes} nodes, got one for"
                    f" {edge_index.kind} with {edge_index.num_nodes}"
                )
        elif edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise ValueError(f"edge_index must be (2, E), got {tuple(edge_index.shape)}")


def _check_sizes(
    kind: str, num_nodes: int, in_features: int, hidden_features: int, num_layers: tuple[int, int]
) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    sizes = {"num_nodes": num_nodes, "in_features": in_features, "hidden_features": hidden_features}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if num_layers[0] != num_layers[1] or num_layers[0] < 1:
        raise ValueError(
            "num_layers must be two equal numbers of at least 1, for the decoder starts in the encoder's"
            f" states; got {num_layers}"
        )
