"""Time a forward and backward of every rung beside nn.Linear, verified first, and write results.csv.

    python -m examples.custom_linear.bench

One round times every layer once, in an order that turns with each round, so that a slow moment of the machine
meets all of them; the ratio to nn.Linear is the median over the rounds of the ratio within a round.
"""

import argparse
import csv
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from fastlayers.equivalence import Verdict, assert_linear_as_accurate

from .rungs import LAYERS

RESULTS = Path(__file__).with_name("results.csv")
SIZES = ((2, 3, 2), (32, 64, 64), (64, 512, 512))  # B, I, O; the first is the one derived on paper


def make_layers(in_features: int, out_features: int) -> dict[str, nn.Module]:
    """nn.Linear and every rung, all with the same weight."""
    layers: dict[str, nn.Module] = {"nn.Linear": nn.Linear(in_features, out_features, bias=False)}
    layers |= {name: layer(in_features, out_features) for name, layer in LAYERS.items()}
    for layer in layers.values():
        layer.load_state_dict(layers["nn.Linear"].state_dict())
    return layers


def verify(layer: nn.Module, x: torch.Tensor, grad_y: torch.Tensor) -> str:
    """Judge the output and both gradients against float64; give the worst error, 1 being nn.Linear's own."""

    def function(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight[0]}, (x[:, 0],)).unsqueeze(1)

    weight = layer.weight.detach()[None]  # (1, O, I): a list of one linear
    judgements = assert_linear_as_accurate(function, None, x[:, None], weight, None, grad_y[:, None])
    if all(j.verdict == Verdict.BITWISE for j in judgements):
        return "bitwise equal"
    return f"{max(j.ratio for j in judgements):.2f}"


def time_us(layer: nn.Module, x: torch.Tensor, grad_y: torch.Tensor, calls: int) -> float:
    """Microseconds for one forward and backward."""
    leaves = (x, layer.weight)
    start = time.perf_counter()
    for _ in range(calls):
        torch.autograd.grad(layer(x), leaves, grad_y)
    return (time.perf_counter() - start) / calls * 1e6


def measure(batch: int, in_features: int, out_features: int, rounds: int) -> list[dict[str, object]]:
    """One row of figures per layer, at one size."""
    layers = make_layers(in_features, out_features)
    x = torch.randn(batch, in_features, requires_grad=True)
    grad_y = torch.randn(batch, out_features)
    errors = {name: verify(layer, x.detach(), grad_y) for name, layer in layers.items()}
    calls = {n: max(1, int(2e3 / time_us(layer, x, grad_y, 10))) for n, layer in layers.items()}  # 2 ms each
    names, times = list(layers), {name: [] for name in layers}
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            times[name].append(time_us(layers[name], x, grad_y, calls[name]))
    rows = []
    for name in names:
        ratios = [t / base for t, base in zip(times[name], times["nn.Linear"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        rows.append(
            {
                "rung": name,
                "B": batch,
                "I": in_features,
                "O": out_features,
                "time_us": f"{statistics.median(times[name]):.1f}",
                "ratio": f"{statistics.median(ratios):.2f}",
                "ratio_q25": f"{low:.2f}",
                "ratio_q75": f"{high:.2f}",
                "error": errors[name],
            }
        )
    return rows


def machine() -> dict[str, object]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "dtype": "float32",
        "cpu": cpu or platform.processor(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1, help="the loops use one whatever this is")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = [row | machine() for size in SIZES for row in measure(*size, args.rounds)]
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(*(f"{row[key]!s:>14}" for key in ("rung", "B", "I", "O", "time_us", "ratio", "error")))


if __name__ == "__main__":
    main()
