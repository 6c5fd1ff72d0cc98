"""TopoMAD as a detector, in PyOD's conventions: fit, decision_function, predict, explain, save, load."""

import inspect
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .data import Metrics, Scaler, read_edges, read_metrics
from .graph import Graph
from .model import GraphLSTMVAE
from .threshold import threshold_of
from .training import Epoch, Trainer, TrainingSettings, windows_at

SCORES = ("squared_error", "nll")
POOLINGS = ("max", "mean")
SCORING_BATCH = 512


class Alarm(NamedTuple):
    """A run of abnormal rows: their index from `start` to `stop` (both in it), the highest score, and what is
    most likely to blame, worst first: (node, share) and (node, metric, share) of the whole score."""

    start: Any
    stop: Any
    score: float
    nodes: list[tuple[str, float]]
    metrics: list[tuple[str, str, float]]


class TopoMAD:
    """Find anomalies in the metrics of the nodes of a system, using the graph between the nodes.

        detector = TopoMAD().fit(X, edges)
        scores, labels = detector.decision_function(new), detector.predict(new)

    X is a (T, N, M) array, a frame with the column levels node and metric in any order, or a CSV file of one;
    edges are pairs of names, (2, E) indices or a CSV file (see `models.topomad.data`). Rows are equally
    spaced in time. NaN is no value: it is left out of the loss and of the scores.

    A score is the squared error, or the negative log-likelihood, of a row as reconstructed from the window
    that ends with it, in units of the training rows' standard deviation. Higher is more abnormal.

    Args:
        kind: "GCN", "GAT", "WL1" or "LIN" (no graph).
        hidden_features, num_layers: H, and the cells of the encoder and of the decoder.
        heads, dropout: of the attention, for "GAT".
        window: rows of a window.
        score: "squared_error", whatever variance the model gives itself, or "nll".
        pooling: how a system's score follows from its nodes': "max" or "mean".
        samples: 0 for the latent vector's mean; else the score is averaged over so many draws of it.
        threshold: "quantile", "mad", "pot" or a number, see `threshold_of`; may be changed after `fit`.
        contamination: the share of training rows above the "quantile" threshold.
        epochs, batch_size, learning_rate, weight_decay, kl_weight, kl_warmup, validation_share, patience,
            bfloat16: see `TrainingSettings`.
        clip: z-scores are cut at so many standard deviations.
        device: "auto" (a GPU where there is one), or a torch device.
        random_state: seed of everything that is drawn; the global random state is left alone.
        verbose: print a line for every epoch.

    Attributes, after `fit`:
        decision_scores_, labels_: scores (T,) and 0/1 of the training rows.
        threshold_: scores above it are abnormal.
        history_: one `Epoch` each.
        nodes_, metrics_: the names.
    """

    def __init__(
        self,
        kind: str = "GCN",
        *,
        hidden_features: int = 16,
        num_layers: int = 2,
        heads: int = 8,
        dropout: float = 0.0,
        window: int = 10,
        score: str = "squared_error",
        pooling: str = "max",
        samples: int = 0,
        threshold: str | float = "quantile",
        contamination: float = 0.01,
        epochs: int = 40,
        batch_size: int = 32,
        learning_rate: float = 3e-3,
        weight_decay: float = 1e-4,
        kl_weight: float = 1.0,
        kl_warmup: int = 5,
        validation_share: float = 0.2,
        patience: int = 10,
        bfloat16: bool = False,
        clip: float = 30.0,
        device: str | torch.device = "auto",
        random_state: int = 0,
        verbose: bool = False,
    ) -> None:
        values = locals()
        for name in self._parameter_names():
            setattr(self, name, values[name])

    @classmethod
    def _parameter_names(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Give the arguments of the constructor, as they are now."""
        return {name: getattr(self, name) for name in self._parameter_names()}

    def set_params(self, **parameters: Any) -> "TopoMAD":
        """Set arguments of the constructor; those of the network act from the next `fit` on.

        Raises:
            ValueError: an unknown name.
        """
        for name, value in parameters.items():
            if name not in self._parameter_names():
                known = ", ".join(self._parameter_names())
                raise ValueError(f"TopoMAD has no parameter {name!r}; it has {known}")
            setattr(self, name, value)
        return self

    def fit(
        self,
        X: Any,
        edges: Any = None,
        y: Any = None,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        on_epoch: Callable[[Epoch], object] | None = None,
    ) -> "TopoMAD":
        """Train on rows that are, for the most part, normal.

        Args:
            X, edges: see the class; no edges mean that every node stands for itself.
            y: ignored, as PyOD has it.
            checkpoint: a file that training is saved to after every epoch, and resumed from where it exists.
            on_epoch: called after every epoch.

        Raises:
            TypeError, ValueError: bad settings, metrics or edges, too few rows.
        """
        self._check_settings()
        metrics = read_metrics(X)
        needed = 2 * self.window + 1
        if len(metrics.values) < needed:
            raise ValueError(
                f"X must have at least {needed} rows for window = {self.window}, got {len(metrics.values)}"
            )
        self.nodes_, self.metrics_ = metrics.nodes, metrics.metrics
        self.edge_index_ = read_edges(edges, self.nodes_)
        self._scaler = Scaler.fit(metrics, self.clip)
        device = self._device()
        with torch.random.fork_rng([]):
            torch.manual_seed(self.random_state)
            self.model_ = self._build().to(device)
        values, observed = (tensor.to(device) for tensor in self._scaler.transform(metrics.values))
        trainer = Trainer(
            self.model_,
            values,
            self._graph(),
            self._training_settings(),
            observed=None if bool(observed.all()) else observed,
            seed=self.random_state,
        )
        trainer.run(checkpoint, on_epoch=self._report(on_epoch))
        self.history_ = trainer.history
        self._train_scores = self._pool(self._node_scores(values, observed))
        self.reset_stream()
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Score each row of X: (T,), NaN for the first window - 1 rows."""
        return self._pool(self._node_scores(*self._prepare(X)[1:])).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Label each row of X: (T,), 1 where the score is above `threshold_`, else 0."""
        return self._label(self.decision_function(X))

    def node_scores(self, X: Any) -> Any:
        """Score each node at each row: (T, N); a frame with X's index where X is a frame."""
        metrics, *prepared = self._prepare(X)
        return _like(X, metrics, self._node_scores(*prepared), [self.nodes_])

    def metric_scores(self, X: Any) -> Any:
        """Score each metric of each node at each row: (T, N, M), NaN where not measured; or a frame."""
        metrics, *prepared = self._prepare(X)
        return _like(X, metrics, self._scores(*prepared), [self.nodes_, self.metrics_])

    def explain(self, X: Any, top_k: int = 3) -> list[Alarm]:
        """Find the runs of abnormal rows, and for each the nodes and metrics that its score comes from."""
        metrics, values, observed = self._prepare(X)
        scores = self._scores(values, observed)
        nodes = scores.nanmean(-1)
        labels = self._label(self._pool(nodes).numpy())
        edges = np.flatnonzero(np.diff(np.concatenate([[0], labels, [0]])))
        alarms = []
        for start, stop in edges.reshape(-1, 2).tolist():
            by_node = nodes[start:stop].nanmean(0).clamp(min=0)
            by_metric = scores[start:stop].nanmean(0).nan_to_num().clamp(min=0)
            total = by_node.nansum().clamp(min=1e-12), by_metric.sum().clamp(min=1e-12)
            best = by_node.nan_to_num().argsort(descending=True)[:top_k].tolist()
            pairs = by_metric.flatten().argsort(descending=True)[:top_k].tolist()
            worst = [divmod(pair, len(self.metrics_)) for pair in pairs]
            alarms.append(
                Alarm(
                    metrics.index[start],
                    metrics.index[stop - 1],
                    float(self._pool(nodes[start:stop]).max()),
                    [(self.nodes_[n], float(by_node[n] / total[0])) for n in best],
                    [(self.nodes_[n], self.metrics_[m], float(by_metric[n, m] / total[1])) for n, m in worst],
                )
            )
        return alarms

    def score_next(self, rows: Any) -> np.ndarray:
        """Score rows as they come: (N, M) or (K, N, M), or a frame of K rows -> (K,).

        Scores are those that `decision_function` gives for all rows since the last `reset_stream` (with other
        draws where `samples` is not 0); each row costs one window.
        """
        if hasattr(rows, "ndim") and not hasattr(rows, "columns") and rows.ndim == 2:
            rows = rows[None]
        metrics = read_metrics(rows, nodes=self.nodes_, metrics=self.metrics_)
        last = self._stream[0][-1] if len(self._stream[0]) else None
        fresh = self._scaler.transform(metrics.values, last)
        values, observed = (torch.cat(pair) for pair in zip(self._stream, fresh, strict=True))
        scores = self._pool(self._node_scores(values.to(self._device()), observed.to(self._device())))
        keep = slice(max(len(values) - self.window + 1, 0), None)
        self._stream = (values[keep], observed[keep])
        return scores[-len(metrics.values) :].numpy()

    def reset_stream(self) -> None:
        """Forget the rows that `score_next` has seen."""
        shape = (0, len(self.nodes_), len(self.metrics_))
        self._stream = (torch.zeros(shape), torch.zeros(shape, dtype=torch.bool))

    @property
    def decision_scores_(self) -> np.ndarray:
        return self._train_scores.numpy()

    @property
    def threshold_(self) -> float:
        return threshold_of(self._train_scores, self.threshold, self.contamination)

    @property
    def labels_(self) -> np.ndarray:
        return self._label(self.decision_scores_)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the detector as one safetensors file, settings and names as JSON in its header."""
        from .saving import save_detector

        save_detector(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str], device: str | torch.device = "auto") -> "TopoMAD":
        """Read what `save` wrote.

        Raises:
            ValueError: a file that is no saved detector, or of a later format.
        """
        from .saving import load_detector

        return load_detector(path, device)

    def _check_settings(self) -> None:
        for name, allowed in (("score", SCORES), ("pooling", POOLINGS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not 0 < self.contamination < 1:
            raise ValueError(f"contamination must lie between 0 and 1, got {self.contamination}")
        if self.window < 2:
            raise ValueError(f"window must be at least 2, got {self.window}")

    def _training_settings(self) -> TrainingSettings:
        names = TrainingSettings.__dataclass_fields__.keys() & set(self._parameter_names())
        return TrainingSettings(**{name: getattr(self, name) for name in names})

    def _build(self) -> GraphLSTMVAE:
        heads, dropout = (self.heads, self.dropout) if self.kind == "GAT" else (1, 0.0)
        return GraphLSTMVAE(
            self.kind,
            len(self.nodes_),
            len(self.metrics_),
            self.hidden_features,
            num_layers=(self.num_layers, self.num_layers),
            heads=(heads, heads),
            dropout=(dropout, dropout),
        )

    def _device(self) -> torch.device:
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def _graph(self) -> Graph:
        return self.model_.prepare_graph(self.edge_index_)

    def _report(self, on_epoch: Callable[[Epoch], object] | None) -> Callable[[Epoch], object]:
        def report(epoch: Epoch) -> None:
            if self.verbose:
                print(
                    f"epoch {epoch.epoch + 1}: loss {epoch.train_loss:.2f}, validation"
                    f" {epoch.validation_loss:.2f}, {epoch.seconds:.1f} s",
                    flush=True,
                )
            if on_epoch is not None:
                on_epoch(epoch)

        return report

    def _prepare(self, X: Any) -> tuple[Metrics, Tensor, Tensor]:
        if not hasattr(self, "model_"):
            raise RuntimeError("this TopoMAD is not fitted yet: call fit(X, edges) first")
        metrics = read_metrics(X, nodes=self.nodes_, metrics=self.metrics_)
        return metrics, *(tensor.to(self._device()) for tensor in self._scaler.transform(metrics.values))

    @torch.no_grad()
    def _scores(self, values: Tensor, observed: Tensor) -> Tensor:
        """Score every metric: (T, N, M) twice -> (T, N, M), NaN for the first rows and what is missing."""
        scores = torch.full(values.shape, math.nan)
        graph, first = self._graph(), self.window - 1
        generator = torch.Generator().manual_seed(self.random_state)
        if len(values) < self.window:
            return scores
        for starts in torch.arange(len(values) - first).split(SCORING_BATCH):
            windows = windows_at(values, starts, self.window)
            rows = slice(int(starts[0]) + first, int(starts[-1]) + first + 1)
            scores[rows] = self._score_last(windows, graph, generator).float().cpu()
        return scores.masked_fill_(~observed.cpu(), math.nan)

    def _score_last(self, windows: Tensor, graph: Graph, generator: torch.Generator) -> Tensor:
        """Score the last row of each window, (B, T, N, M) -> (B, N, M); all samples share one encoding."""
        model, last = self.model_, windows[:, -1]
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=self.bfloat16):
            mu, logvar = model.encode_moments(windows.transpose(0, 1), graph)
            latent = mu[None]
            if self.samples:
                noise = torch.randn(self.samples, *mu.shape, generator=generator).to(mu)
                latent = mu + noise * torch.exp(logvar / 2)
            output, output_logvar = (tensor.float() for tensor in model.emit(latent))
        score = (last - output).square()
        if self.score == "nll":
            score = score * torch.exp(-output_logvar) + output_logvar
        return score.mean(0)

    def _node_scores(self, values: Tensor, observed: Tensor) -> Tensor:
        return self._scores(values, observed).nanmean(-1)

    def _pool(self, nodes: Tensor) -> Tensor:
        """A row's score from its nodes': (T, N) -> (T,), NaN where no node has one."""
        if self.pooling == "mean":
            return nodes.nanmean(-1)
        missing = nodes.isnan()
        return nodes.masked_fill(missing, -math.inf).amax(-1).masked_fill(missing.all(-1), math.nan)

    def _label(self, scores: np.ndarray) -> np.ndarray:
        return (np.nan_to_num(scores, nan=-np.inf) > self.threshold_).astype(np.int64)


def _like(X: Any, metrics: Metrics, scores: Tensor, levels: list[tuple[str, ...]]) -> Any:
    """Give scores as a frame with X's index where X is a frame or a file, else as an array."""
    if not hasattr(X, "columns") and not isinstance(X, (str, os.PathLike)):
        return scores.numpy()
    import pandas

    names = ["node", "metric"][: len(levels)]
    columns = pandas.MultiIndex.from_product(levels, names=names)
    if len(levels) == 1:
        columns = pandas.Index(levels[0], name="node")
    return pandas.DataFrame(scores.flatten(1).numpy(), index=metrics.index, columns=columns)
