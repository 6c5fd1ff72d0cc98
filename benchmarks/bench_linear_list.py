"""Time LinearList's forward against the ways PyTorch has to say the same, on the same tensors.

    python benchmarks/bench_linear_list.py [--csv FILE] [--seconds 2]

Every way is judged first, then all are run in turn; a row holds medians and quartiles and the machine.
Only ratios within one run are results.
"""

import argparse
import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fastlayers import LinearList
from fastlayers.equivalence import assert_as_accurate

SHAPES = ((32, 10_000, 7, 7), (32, 50, 3, 3), (1, 10_000, 7, 7), (32, 1000, 16, 16), (32, 862, 96, 24))


def ways(layer: LinearList, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Each way to compute x (B, N, I) -> (B, N, O)."""
    linears = layer.to_linears()
    weight, bias = layer.weight.detach(), layer.bias.detach()
    transposed, row = weight.mT, bias.unsqueeze(1)
    return {
        "fastlayers": lambda: layer(x),
        "loop": lambda: torch.stack([linear(x[:, n]) for n, linear in enumerate(linears)], 1),
        "baddbmm": lambda: torch.baddbmm(row, x.transpose(0, 1), transposed).transpose(0, 1),
        "bmm": lambda: torch.bmm(x.transpose(0, 1), transposed).transpose(0, 1) + bias,
        "einsum": lambda: torch.einsum("bni,noi->bno", x, weight) + bias,
    }


@torch.no_grad()
def run(shape: tuple[int, int, int, int], seconds: float) -> list[dict[str, object]]:
    """Judge, then time, all ways at one shape."""
    batch, num_linears, in_features, out_features = shape
    torch.manual_seed(0)
    layer = LinearList(in_features, out_features, num_linears)
    x = torch.randn(batch, num_linears, in_features)
    functions = ways(layer, x)
    exact = ways(LinearList.from_linears(layer.to_linears()).double(), x.double())["einsum"]()
    original = functions["loop"]()
    for name, function in functions.items():
        assert_as_accurate(function(), original, exact, name=name)
    taken: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while len(taken["loop"]) < 5 or time.perf_counter() < end:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            taken[name].append((time.perf_counter() - start) * 1e3)
    ours = statistics.median(taken["fastlayers"])
    rows: list[dict[str, object]] = []
    for name, times in taken.items():
        low, median, high = statistics.quantiles(times, n=4)
        rows.append(
            {"B": batch, "N": num_linears, "I": in_features, "O": out_features, "way": name}
            | {"time_ms": median, "low_ms": low, "high_ms": high, "to_fastlayers": median / ours}
            | {"machine": machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        )
    return rows


def machine() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, help="write the rows to this file too")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each shape (default 2)")
    options = parser.parse_args()
    rows = [row for shape in SHAPES for row in run(shape, options.seconds)]
    for row in rows:
        shape = f"({row['B']}, {row['N']}, {row['I']}, {row['O']})"
        print(f"{shape:22} {row['way']:11} {row['time_ms']:9.3f} ms  {row['to_fastlayers']:7.2f}x")
    print(f"{rows[0]['machine']}, {rows[0]['threads']} threads, torch {rows[0]['torch']}, float32, forward")
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
