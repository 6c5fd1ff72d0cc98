"""GraphLSTMVAE: a sequence-to-sequence variational autoencoder over the metrics of all nodes of a graph.

He et al., "A Spatiotemporal Deep Learning Approach for Unsupervised Anomaly Detection in Cloud Systems",
IEEE TNNLS 34(4), 2023, doi 10.1109/TNNLS.2020.3027736.
"""

import torch
from torch import Tensor, nn

from .cells import KINDS, GraphLSTM, State, batch_edges


class GraphLSTMVAE(nn.Module):
    """Encode windows of node metrics into one latent vector per node, and decode them backwards in time.

    Each node has its own small linears: `mu` and `logvar` from the encoder's last h to the latent vector,
    `hidden2output` and `hidden2output_logvar` from a decoder state to the metrics. Names and shapes of all
    parameters are those of the authors' checkpoints.

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

    Raises:
        ValueError: an unknown kind, a size below 1, or unequal numbers of layers.
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
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        sizes = {"num_nodes": num_nodes, "in_features": in_features, "hidden_features": hidden_features}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if num_layers[0] != num_layers[1] or num_layers[0] < 1:
            raise ValueError(
                f"num_layers must be two equal numbers of at least 1, for the decoder starts in the"
                f" encoder's states; got {num_layers}"
            )
        self.kind, self.variational = kind, variational
        self.num_nodes, self.in_features, self.hidden_features = num_nodes, in_features, hidden_features

        def stack(k: int) -> GraphLSTM:
            settings = {"heads": heads[k], "dropout": dropout[k], "bias": bias[k]}
            return GraphLSTM(kind, in_features, hidden_features, num_layers[k], **settings)

        def linears(out_features: int) -> nn.ModuleList:
            one_per_node = (nn.Linear(hidden_features, out_features, bias=bias[1]) for _ in range(num_nodes))
            return nn.ModuleList(one_per_node)

        self.encoder = stack(0)
        self.decoder = stack(1)
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
        edge_index: Tensor,
        use_teacher_forcing: bool = True,
        *,
        eps: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Reconstruct windows of metrics.

        Args:
            windows: (B, T, N, M).
            edge_index: (2, E), source and target node of each edge; one graph for all windows.
            use_teacher_forcing: in training mode, let the decoder read the true following time step instead
                of its own output. In eval mode it always reads its own output.
            eps: (B, N, H), the standard normal noise of the latent vector; drawn where None.

        Returns:
            output (B, T, N, M), enc_hidden (B, N, H: the latent vector where variational, else the encoder's
            last h) and, where variational, mu, logvar (B, N, H) and output_logvar (B, T, N, M).
        """
        self._check(windows, edge_index)
        batch_size, num_steps = windows.shape[:2]
        edges = batch_edges(edge_index, self.num_nodes, batch_size)
        sequence = windows.transpose(0, 1)

        zeros = windows.new_zeros(batch_size, self.num_nodes, self.hidden_features)
        encoded, states = self.encoder(sequence, [State(zeros, zeros)] * len(self.encoder.cell_list), edges)
        latent = encoded[-1]
        if self.variational:
            mu = self.deal_list(self.mu, latent)
            logvar = self.deal_list(self.logvar, latent)
            noise = torch.randn_like(mu) if eps is None else eps
            latent = mu + noise * torch.exp(logvar)

        # The latent vector gives the last time step; from there the decoder walks backwards in time.
        hidden = latent
        steps = [self._emit(hidden)]
        for t in range(num_steps - 1, 0, -1):
            following = sequence[t] if self.training and use_teacher_forcing else steps[-1][0]
            decoded, states = self.decoder(following[None], states, edges)
            steps.append(self._emit(decoded[0]))
        steps.reverse()
        output = torch.stack([step[0] for step in steps], dim=1)
        if not self.variational:
            return output, latent
        return output, latent, mu, logvar, torch.stack([step[1] for step in steps], dim=1)

    def loss(self, windows: Tensor, result: tuple[Tensor, ...]) -> Tensor:
        """Give the training loss of what `forward` returned for `windows`, a scalar.

        Variational: the Gaussian negative log-likelihood, without its constant, plus the divergence of the
        latent vector from a standard normal, each summed over a window and averaged over the batch. Otherwise
        the mean squared error.
        """
        error = (windows - result[0]).square()
        if not self.variational:
            return error.mean()
        _, _, mu, logvar, output_logvar = result
        likelihood = 0.5 * (error / output_logvar.exp() + output_logvar).flatten(1).sum(1).mean()
        divergence = -0.5 * (1 + logvar - mu.square() - logvar.exp()).flatten(1).sum(1).mean()
        return likelihood + divergence

    def _emit(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Map one time step's h (B, N, H) to the metrics' mean and, where variational, log-variance."""
        output = self.deal_list(self.hidden2output, hidden)
        if not self.variational:
            return (output,)
        return output, self.deal_list(self.hidden2output_logvar, hidden)

    def _check(self, windows: Tensor, edge_index: Tensor) -> None:
        expected = (self.num_nodes, self.in_features)
        if windows.dim() != 4 or windows.shape[2:] != expected or windows.shape[1] < 1:
            raise ValueError(
                f"windows must be (batch, time, node, metric) = (*, *, {expected[0]}, {expected[1]}),"
                f" got {tuple(windows.shape)}"
            )
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise ValueError(f"edge_index must be (2, E), got {tuple(edge_index.shape)}")
