"""The authors' structure of TopoMAD, to measure against: the same model and numbers, run their way.

A batch of graphs is put together from single ones at every cell of every time step, graph layers are
torch-geometric's, every node's linear is called by itself, and outputs are written step by step into a buffer
of zeros.
"""

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from models.topomad import GraphLSTMVAE


class OriginalStructure(GraphLSTMVAE):
    """`GraphLSTMVAE` in paper mode, run as the authors' code runs it; takes edge_index (2, E)."""

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, mode="paper", **settings)

    def _cell(
        self, cell: nn.Module, x: Tensor, h: Tensor, c: Tensor, edge_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        combined = torch.cat([x, h], dim=-1)
        if self.kind == "LIN":
            gates = cell.gconv(combined)
        else:
            batch = Batch.from_data_list([Data(x=window, edge_index=edge_index) for window in combined])
            gates = cell.gconv(batch.x, batch.edge_index).view(*x.shape[:2], -1)
        i, f, o, g = torch.split(gates, self.hidden_features, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def forward(
        self,
        windows: Tensor,
        edge_index: Tensor,
        use_teacher_forcing: bool = True,
        *,
        eps: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        batch_size, num_steps = windows.shape[:2]
        shape = (batch_size, self.num_nodes, self.hidden_features)
        states = [(torch.zeros(shape), torch.zeros(shape)) for _ in self.encoder.cell_list]
        for t in range(num_steps):
            x = windows[:, t]
            for k, cell in enumerate(self.encoder.cell_list):
                states[k] = self._cell(cell, x, *states[k], edge_index)
                x = states[k][0]
        latent = states[-1][0]
        if self.variational:
            mu, logvar = self.deal_list(self.mu, latent), self.deal_list(self.logvar, latent)
            noise = torch.randn_like(mu) if eps is None else eps
            latent = mu + noise * torch.exp(logvar)

        output = torch.zeros_like(windows)
        output_logvar = torch.zeros_like(windows)
        hidden = latent
        for t in reversed(range(num_steps)):
            output[:, t] = self.deal_list(self.hidden2output, hidden)
            if self.variational:
                output_logvar[:, t] = self.deal_list(self.hidden2output_logvar, hidden)
            if t == 0:
                break
            x = windows[:, t] if self.training and use_teacher_forcing else output[:, t].clone()
            for k, cell in enumerate(self.decoder.cell_list):
                states[k] = self._cell(cell, x, *states[k], edge_index)
                x = states[k][0]
            hidden = x
        if not self.variational:
            return output, latent
        return output, latent, mu, logvar, output_logvar
