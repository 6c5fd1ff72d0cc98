"""Train a model on one long series of node metrics: windows by index, Adam, gradient clipping."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .model import GraphLSTMVAE


class Epoch(NamedTuple):
    """What happened in one epoch; losses are means over the windows."""

    epoch: int
    train_loss: float
    seconds: float


def windows_at(series: Tensor, starts: Tensor, window: int) -> Tensor:
    """Cut windows out of a series: series (T, N, M), starts (B,) -> (B, window, N, M)."""
    steps = torch.arange(window, device=series.device)
    return series[starts[:, None] + steps]


def train_paper(
    model: GraphLSTMVAE,
    series: Tensor,
    edge_index: Tensor,
    *,
    window: int = 10,
    epochs: int = 10,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    weight_decay: float = 1e-4,
    max_norm: float = 5.0,
    seed: int = 0,
    on_step: Callable[[float], None] | None = None,
) -> list[Epoch]:
    """Train with the authors' optimiser settings, always with teacher forcing; the model is changed in place.

    Args:
        series: (T, N, M), normalised, at least `window` rows.
        edge_index: (2, E).
        seed: of the order of the windows and of the latent noise; the global random state is not touched.
        on_step: called after every optimiser step with its loss.

    Returns:
        One `Epoch` each.
    """
    num_windows = series.shape[0] - window + 1
    if num_windows < 1:
        raise ValueError(f"series must have at least window = {window} rows, got {series.shape[0]}")
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    model.train()
    history = []
    for epoch in range(epochs):
        began, total = time.perf_counter(), 0.0
        for starts in torch.randperm(num_windows, generator=generator).split(batch_size):
            batch = windows_at(series, starts, window)
            eps = torch.randn(
                len(starts), model.num_nodes, model.hidden_features, generator=generator, dtype=batch.dtype
            )
            loss = model.loss(batch, model(batch, edge_index, eps=eps))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            total += loss.item() * len(starts)
            if on_step is not None:
                on_step(loss.item())
        history.append(Epoch(epoch, total / num_windows, time.perf_counter() - began))
    return history
