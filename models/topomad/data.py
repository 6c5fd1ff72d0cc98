"""Metrics and topologies as users have them, read into tensors; bad data is refused with the place in it.

Nothing that is passed in is ever changed. pandas is needed only for frames and CSV files.
"""

import gzip
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PICKLES = (".pkl", ".pickle", ".p")
LONG_COLUMNS = ("time", "node", "metric", "value")


@dataclass(frozen=True)
class Metrics:
    """values (T, N, M) float32, NaN where nothing was measured; names of nodes and metrics; index of rows."""

    values: Tensor
    nodes: tuple[str, ...]
    metrics: tuple[str, ...]
    index: Sequence[Any]


def read_metrics(
    data: Any, *, nodes: Sequence[str] | None = None, metrics: Sequence[str] | None = None
) -> Metrics:
    """Read metrics from what users have.

    Args:
        data: a (T, N, M) array or tensor; a pandas frame with two column levels, node and metric, in any
            order of columns; a frame with the columns time, node, metric and value; the path of a CSV file of
            either kind of frame (two header rows, the first column the time); or `Metrics`.
        nodes, metrics: the names to read, in order, where they are known: others are an error, and columns
            may come in any order. For an array: the names to give.

    Raises:
        TypeError: another type.
        ValueError: another shape, names that are missing, unknown or there twice, or infinite values.
    """
    if isinstance(data, (str, os.PathLike)):
        data = _read_csv(Path(data))
    if isinstance(data, Metrics):
        found = data
    elif hasattr(data, "columns"):
        found = _from_frame(data)
    elif hasattr(data, "shape"):
        found = _from_array(data, nodes, metrics)
    else:
        raise TypeError(f"X must be a (T, N, M) array, a frame or a CSV file, got {type(data).__name__}")
    found = _in_order(found, nodes, metrics)
    infinite = found.values.isinf().nonzero()
    if len(infinite):
        row, node, metric = infinite[0].tolist()
        raise ValueError(
            f"X has {len(infinite)} infinite values, the first in row {row} of ({found.nodes[node]},"
            f" {found.metrics[metric]}): replace them, by NaN where nothing was measured"
        )
    return found


def read_edges(edges: Any, nodes: Sequence[str]) -> Tensor:
    """Read a topology into (2, E) int64, indices into `nodes`.

    Args:
        edges: (2, E) indices; pairs of names; a frame or a CSV file with the columns source and target; or
            None for no edges.

    Raises:
        ValueError: a node that is not there, another shape, or a pickle.
    """
    if edges is None:
        return torch.empty(2, 0, dtype=torch.int64)
    if isinstance(edges, (str, os.PathLike)):
        path = Path(edges)
        if path.suffix in PICKLES:
            raise ValueError(
                f"{path}: a pickle can run any code when it is read, so it is not; in the program that wrote"
                " it, write the edges to a CSV file with the columns source and target"
            )
        edges = _pandas().read_csv(path, dtype=str)
    if hasattr(edges, "columns"):
        if not {"source", "target"} <= set(edges.columns):
            raise ValueError(f"edges must have the columns source and target, got {list(edges.columns)}")
        edges = list(zip(edges["source"], edges["target"], strict=True))
    if hasattr(edges, "shape"):
        index = torch.as_tensor(edges)
        if index.dim() != 2 or index.shape[0] != 2 or index.is_floating_point():
            raise ValueError(f"edges must be (2, E) whole numbers, got {tuple(index.shape)} {index.dtype}")
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(nodes):
            raise ValueError(f"edges must name nodes from 0 to {len(nodes) - 1}, got {int(index.max())}")
        return index.long()
    place = {str(node): k for k, node in enumerate(nodes)}
    pairs = [(str(source), str(target)) for source, target in edges]
    unknown = sorted({name for pair in pairs for name in pair if name not in place})
    if unknown:
        raise ValueError(f"edges name nodes that X does not have: {', '.join(unknown[:8])}")
    return torch.tensor([[place[s] for s, _ in pairs], [place[t] for _, t in pairs]], dtype=torch.int64)


class Scaler:
    """z-scores by the training rows, clipped; what is missing takes the last value seen, no later one."""

    def __init__(self, mean: Tensor, std: Tensor, clip: float) -> None:
        self.mean, self.std, self.clip = mean, std, clip

    @staticmethod
    def fit(metrics: Metrics, clip: float) -> "Scaler":
        """Take mean and standard deviation (N, M) of what was measured.

        A metric that never changes gets 1 % of its value, or 1, for its deviation, so that a later change
        shows.

        Raises:
            ValueError: columns that hold nothing but NaN.
        """
        values = metrics.values.double()
        empty = values.isnan().all(0).nonzero().tolist()
        if empty:
            names = ", ".join(f"({metrics.nodes[n]}, {metrics.metrics[m]})" for n, m in empty[:8])
            raise ValueError(f"X has {len(empty)} columns without any value: {names}")
        mean = values.nanmean(0)
        std = (values - mean).square().nanmean(0).sqrt()
        constant = std <= 1e-7 * mean.abs()
        fallback = torch.where(mean.abs() > 0, 0.01 * mean.abs(), 1.0)
        return Scaler(mean, torch.where(constant, fallback, std), clip)

    def transform(self, values: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scale (T, N, M) to float32 without NaN, and say what was measured (T, N, M).

        before: (N, M), scaled, the last values seen before these rows; the mean where None.
        """
        scaled = ((values.double() - self.mean) / self.std).clamp(-self.clip, self.clip)
        observed = ~scaled.isnan()
        start = torch.zeros_like(self.mean) if before is None else before.double()
        filled = torch.cat([start[None], scaled])
        rows = torch.arange(len(filled)).view(-1, 1, 1)
        seen = torch.cat([torch.ones_like(observed[:1]), observed])
        last = torch.where(seen, rows, 0).cummax(0).values
        return filled.gather(0, last)[1:].float(), observed


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError("frames and CSV files need pandas: pip install pandas") from error
    return pandas


def _read_csv(path: Path) -> Any:
    pandas = _pandas()
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        header = [cell.strip() for cell in file.readline().split(",")]
    if set(LONG_COLUMNS) <= set(header):
        return pandas.read_csv(path, dtype={"node": str, "metric": str})
    return pandas.read_csv(path, header=[0, 1], index_col=0)


def _from_array(data: Any, nodes: Sequence[str] | None, metrics: Sequence[str] | None) -> Metrics:
    if not isinstance(data, Tensor):
        import numpy

        data = torch.from_numpy(numpy.array(data, dtype="float32"))
    values = data
    if values.dim() != 3 or 0 in values.shape:
        raise ValueError(f"X must be (T, N, M), none of them 0, got {tuple(values.shape)}")
    shape = values.shape[1:]
    given = (nodes, metrics)
    names = []
    for size, what, known in zip(shape, ("node", "metric"), given, strict=True):
        names.append(
            tuple(map(str, known)) if known is not None else tuple(f"{what}-{k}" for k in range(size))
        )
        if len(names[-1]) != size:
            raise ValueError(f"X has {size} {what}s, but {len(names[-1])} names of {what}s are known")
    return Metrics(values.to(torch.float32, copy=True), names[0], names[1], range(len(values)))


def _from_frame(frame: Any) -> Metrics:
    pandas = _pandas()
    if frame.columns.nlevels == 1:
        if not set(LONG_COLUMNS) <= set(frame.columns):
            raise ValueError(
                "X must have two levels of columns, node and metric, or the columns time, node, metric and"
                f" value; got {list(map(str, frame.columns[:6]))}"
            )
        twice = frame.duplicated(["time", "node", "metric"])
        if twice.any():
            row = frame.loc[twice].iloc[0]
            raise ValueError(f"X has ({row['node']}, {row['metric']}) twice at {row['time']}")
        frame = frame.pivot(index="time", columns=["node", "metric"], values="value")
    if frame.columns.nlevels != 2:
        raise ValueError(f"X must have two levels of columns, node and metric, got {frame.columns.nlevels}")
    columns = [(str(node), str(metric)) for node, metric in frame.columns]
    twice = [column for column, count in Counter(columns).items() if count > 1]
    if twice:
        raise ValueError(f"X has columns twice: {', '.join(map(str, twice[:8]))}")
    nodes, metrics = (tuple(dict.fromkeys(names)) for names in zip(*columns, strict=True))
    place = {column: k for k, column in enumerate(columns)}
    missing = [(n, m) for n in nodes for m in metrics if (n, m) not in place]
    if missing:
        raise ValueError(
            f"X must have every metric for every node; missing: {', '.join(map(str, missing[:8]))}"
        )
    text = [column for column, kind in zip(columns, frame.dtypes, strict=True) if kind.kind not in "iufb"]
    if text:
        raise ValueError(f"X must hold numbers, but these columns do not: {', '.join(map(str, text[:8]))}")
    order = [place[n, m] for n in nodes for m in metrics]
    array = frame.iloc[:, order].to_numpy(dtype="float32", copy=True)
    values = torch.from_numpy(array).view(len(frame), len(nodes), len(metrics))
    assert isinstance(frame.index, pandas.Index)
    return Metrics(values, nodes, metrics, frame.index)


def _in_order(found: Metrics, nodes: Sequence[str] | None, metrics: Sequence[str] | None) -> Metrics:
    """Put nodes and metrics into the order that is known, and refuse others."""
    if nodes is None or metrics is None:
        return found
    for what, known, here in (("nodes", nodes, found.nodes), ("metrics", metrics, found.metrics)):
        if set(known) != set(here):
            missing, unknown = sorted(set(known) - set(here)), sorted(set(here) - set(known))
            raise ValueError(
                f"X must have the {what} of training; missing {missing[:8]}, unknown {unknown[:8]}"
            )
    if tuple(nodes) == found.nodes and tuple(metrics) == found.metrics:
        return found
    n = torch.tensor([found.nodes.index(node) for node in nodes])
    m = torch.tensor([found.metrics.index(metric) for metric in metrics])
    return Metrics(found.values[:, n][:, :, m], tuple(nodes), tuple(metrics), found.index)


def name_pairs(edge_index: Tensor, nodes: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Give the edges (2, E) as pairs of names."""
    return [(nodes[s], nodes[t]) for s, t in edge_index.t().tolist()]
