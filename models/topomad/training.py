"""Train a GraphLSTMVAE on one long series of node metrics.

Windows are cut out of the series by index. The last part of the series, in time, is for validation; training
stops when that no longer improves, and the best weights are put back. All randomness of an epoch follows from
the seed and the epoch's number, so a run that was killed goes on from its checkpoint as if nothing had been.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .graph import Graph
from .model import GraphLSTMVAE

VALIDATION_BATCH = 256


@dataclass(frozen=True)
class TrainingSettings:
    """How to train.

    window: T, rows of a window. batch_size: windows of a step, over all processes together.
    weight_decay, max_norm: Adam's, and the norm that gradients are clipped to.
    kl_weight, kl_warmup: weight of the latent divergence in the loss, reached linearly in so many epochs.
    forced_share: share of the batches with teacher forcing in the first and, linearly, in the last epoch.
    validation_share: of the rows, the last ones; 0 for none. patience: epochs without improvement before
        training stops.
    bfloat16: run the model under autocast.
    """

    window: int = 10
    epochs: int = 60
    batch_size: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    max_norm: float = 5.0
    kl_weight: float = 1.0
    kl_warmup: int = 5
    forced_share: tuple[float, float] = (1.0, 0.5)
    validation_share: float = 0.2
    patience: int = 10
    bfloat16: bool = False


# The authors' own, with constant teacher forcing; patience, split and rate are those of their notebooks.
PAPER_SETTINGS = TrainingSettings(
    learning_rate=1e-4, epochs=150, kl_warmup=0, forced_share=(1.0, 1.0), validation_share=0.3
)


class Epoch(NamedTuple):
    """What happened in one epoch; losses are means over the windows, NaN where there is no validation."""

    epoch: int
    train_loss: float
    validation_loss: float
    seconds: float


def windows_at(series: Tensor, starts: Tensor, window: int) -> Tensor:
    """Cut windows out of a series: series (T, ...), starts (B,) -> (B, window, ...)."""
    steps = torch.arange(window, device=series.device)
    return series[starts.to(series.device)[:, None] + steps]


class Trainer:
    """One training run: model, optimiser, the split of the series, and what is kept between epochs."""

    def __init__(
        self,
        model: GraphLSTMVAE,
        series: Tensor,
        graph: Graph | Tensor,
        settings: TrainingSettings,
        *,
        observed: Tensor | None = None,
        seed: int = 0,
        on_step: Callable[[float], object] | None = None,
    ) -> None:
        """series (T, N, M), normalised, without NaN; observed, a mask of its shape, or None for all.

        Raises:
            ValueError: a series too short for one training window and, if asked for, one validation window.
        """
        self.model, self.series, self.graph, self.settings = model, series, graph, settings
        self.observed, self.seed, self.on_step = observed, seed, on_step
        rows = len(series)
        validation_rows = math.ceil(rows * settings.validation_share)
        if validation_rows:
            validation_rows = max(validation_rows, settings.window)
        # Validation windows share no row with training windows.
        starts = torch.arange(max(rows - settings.window + 1, 0))
        self.train_starts = starts[: max(rows - validation_rows - settings.window + 1, 0)]
        self.validation_starts = starts[rows - validation_rows :]
        if len(self.train_starts) < 1:
            raise ValueError(
                f"series must have at least {settings.window + validation_rows} rows for window ="
                f" {settings.window} and validation_share = {settings.validation_share}, got {rows}"
            )
        on_gpu = series.device.type == "cuda"
        self.optimizer = torch.optim.Adam(
            model.parameters(),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=next(model.parameters()).dtype in (torch.float32, torch.float64),
        )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.parallel: nn.Module = model
        if self.world_size > 1:
            devices = [series.device] if on_gpu else None
            self.parallel = DistributedDataParallel(model, device_ids=devices)
        self.history: list[Epoch] = []
        self.best_loss, self.best_epoch = math.inf, -1
        self.best_weights = self._weights()

    def run(
        self,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        on_epoch: Callable[[Epoch], object] | None = None,
    ) -> list[Epoch]:
        """Train to the end, from `checkpoint` where that exists, and put the best weights back."""
        if checkpoint is not None and Path(checkpoint).exists():
            self.load(checkpoint)
        while not self.finished:
            epoch = self.run_epoch()
            if on_epoch is not None:
                on_epoch(epoch)
            if checkpoint is not None and self.rank == 0:
                self.save(checkpoint)
        self.model.load_state_dict(self.best_weights)
        self.model.eval()
        return self.history

    @property
    def finished(self) -> bool:
        done = len(self.history)
        stale = len(self.validation_starts) > 0 and done - 1 - self.best_epoch >= self.settings.patience
        return done >= self.settings.epochs or stale

    def run_epoch(self) -> Epoch:
        epoch, began, total = len(self.history), time.perf_counter(), 0.0
        generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
        warmup = self.settings.kl_warmup
        kl_weight = self.settings.kl_weight * min(1.0, (epoch + 1) / (warmup + 1))
        self.model.train()
        order = self.train_starts[torch.randperm(len(self.train_starts), generator=generator)]
        with _own_random_state(generator, self.series.device):
            for starts in order.split(self.settings.batch_size):
                forced = float(torch.rand((), generator=generator)) < self._forced_share(epoch)
                shape = (len(starts), self.model.num_nodes, self.model.hidden_features)
                eps = torch.randn(shape, generator=generator, dtype=self.series.dtype)
                loss = self._step(starts, eps, forced, kl_weight)
                total += loss * len(starts)
                if self.on_step is not None:
                    self.on_step(loss)
        validation = self._validation_loss()
        if not validation >= self.best_loss:  # without validation the last weights are the best
            self.best_loss, self.best_epoch = validation, epoch
            self.best_weights = self._weights()
        self.history.append(Epoch(epoch, total / len(order), validation, time.perf_counter() - began))
        return self.history[-1]

    def _step(self, starts: Tensor, eps: Tensor, forced: bool, kl_weight: float) -> float:
        """Train on one batch, of which this process does its share; give the loss of the whole batch."""
        mine = slice(self.rank, None, self.world_size)
        share = len(starts[mine]) / len(starts)
        if share == 0:  # fewer windows than processes: take part, without weight
            mine = slice(0, 1)
        self.optimizer.zero_grad()
        loss = self._loss(self.parallel, starts[mine], eps[mine].to(self.series.device), forced, kl_weight)
        # DistributedDataParallel averages over processes; a batch's mean weighs each by its windows.
        (loss * (share * self.world_size)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)
        self.optimizer.step()
        part = loss.detach() * share
        if self.world_size > 1:
            dist.all_reduce(part)
        return float(part)

    def _loss(self, model: nn.Module, starts: Tensor, eps: Tensor, forced: bool, kl_weight: float) -> Tensor:
        windows = windows_at(self.series, starts, self.settings.window)
        observed = None
        if self.observed is not None:
            observed = windows_at(self.observed, starts, self.settings.window)
        with torch.autocast(self.series.device.type, torch.bfloat16, enabled=self.settings.bfloat16):
            result = model(windows, self.graph, forced, eps=eps)
        result = tuple(tensor.to(windows.dtype) for tensor in result)
        return self.model.loss(windows, result, observed=observed, kl_weight=kl_weight)

    @torch.no_grad()
    def _validation_loss(self) -> float:
        if not len(self.validation_starts):
            return math.nan
        self.model.eval()
        total = 0.0
        for starts in self.validation_starts.split(VALIDATION_BATCH):
            eps = self.series.new_zeros(len(starts), self.model.num_nodes, self.model.hidden_features)
            total += len(starts) * float(self._loss(self.model, starts, eps, False, self.settings.kl_weight))
        return total / len(self.validation_starts)

    def _forced_share(self, epoch: int) -> float:
        first, last = self.settings.forced_share
        return first + (last - first) * epoch / max(self.settings.epochs - 1, 1)

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything that the rest of the run depends on, whole or not at all."""
        state = {
            "settings": asdict(self.settings) | {"seed": self.seed},
            "model": self._weights(),
            "optimizer": self.optimizer.state_dict(),
            "best_weights": self.best_weights,
            "best": [self.best_loss, self.best_epoch],
            "history": [list(epoch) for epoch in self.history],
        }
        unfinished = Path(f"{os.fspath(path)}.part")
        torch.save(state, unfinished)
        os.replace(unfinished, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save` wrote.

        Raises:
            ValueError: it was written by a run with other settings; the message names them.
        """
        state = torch.load(path, map_location=self.series.device, weights_only=True)
        mine: dict[str, Any] = asdict(self.settings) | {"seed": self.seed}
        theirs = state["settings"]
        other = [f"{k} {theirs.get(k)!r} instead of {v!r}" for k, v in mine.items() if theirs.get(k) != v]
        if other:
            raise ValueError(
                f"{os.fspath(path)}: checkpoint of a run with other settings: {', '.join(other)}"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best_weights = state["best_weights"]
        self.best_loss, self.best_epoch = state["best"]
        self.history = [Epoch(*epoch) for epoch in state["history"]]


@contextlib.contextmanager
def _own_random_state(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Seed what dropout draws from, and give the process its own random state back afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        yield
