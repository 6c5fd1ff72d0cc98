"""Everything that waits for a GPU, in one command of at most 5 minutes: `make gpu`, or

    python benchmarks/gpu.py [--minutes 5] [--out FOLDER]

Needs a GPU, nvcc of torch's CUDA, torch 2.10 or later, pytest and ninja; nothing is downloaded. It builds the
libraries for this card, runs the tests on it with skips turned into failures, compute-sanitizer on a short
selection where that tool works, and the benchmarks; then converts and trains TopoMAD. One folder in
benchmarks/results/ holds the logs, the tables and summary.md. Exit 1: something failed; 3: there is no GPU.
"""

import argparse
import csv
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SANITIZED = """
import torch
from fastlayers import ops
for dtype in (torch.float32, torch.bfloat16):
    for b, n, i, o in ((33, 19, 7, 5), (40, 300, 8, 8), (2, 50, 8, 19)):
        t = [torch.randn(*s, device="cuda", dtype=dtype) for s in ((b, n, i), (n, o, i), (n, o))]
        leaves = [x.requires_grad_() for x in t]
        for channel_last in (False, True):
            y = ops.linear_list(*leaves, out_channel_last=channel_last)
            torch.autograd.grad(y, leaves, torch.randn_like(y))
torch.cuda.synchronize()
"""
ENVIRONMENT = {"FASTLAYERS_REQUIRE_CUDA": "1", "FASTLAYERS_REQUIRE_EXT": "1", "PYTHONPATH": str(ROOT)}


class Steps:
    """Runs the steps as processes of their own, keeps their logs and says how each went."""

    def __init__(self, out: Path, deadline: float) -> None:
        self.out, self.deadline = out, deadline
        self.outcomes: list[tuple[str, str, float]] = []

    def run(self, name: str, command: Sequence[str], limit_s: float, **environment: str) -> bool:
        """Run a command for at most `limit_s`, and never beyond the deadline; its output goes to a log."""
        limit_s = min(limit_s, self.deadline - time.monotonic())
        start = time.monotonic()
        print(f"{name} ...", flush=True)
        try:
            if limit_s < 5:
                raise subprocess.TimeoutExpired(command, 0)
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit_s,
            )
            log, outcome = done.stdout, "passed" if done.returncode == 0 else f"failed ({done.returncode})"
        except subprocess.TimeoutExpired as late:
            log, outcome = str(late.stdout or ""), "out of time"
        (self.out / f"{name}.log").write_text(log)
        self.outcomes.append((name, outcome, time.monotonic() - start))
        print("\n".join(log.strip().splitlines()[-3:]), f"\n{name}: {outcome}", flush=True)
        return outcome == "passed"


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    properties = torch.cuda.get_device_properties(0)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {
        "card": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
        "l2_mib": properties.L2_cache_size / 2**20,
        "driver": driver.stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": git.stdout.strip(),
    }


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """One line for each dataclass."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def benchmark(out: Path, seconds: float) -> int:
    """Time LinearList and its peers (in a process of its own) and write linear_list.csv."""
    from benchmarks.gpu_linear_list import SHAPES, measure
    from benchmarks.gpu_timing import measure_rates

    torch.backends.cuda.matmul.allow_tf32 = False
    deadline = time.monotonic() + seconds
    rates = measure_rates("cuda", (torch.float32, torch.bfloat16))
    facts = {"copy_bytes_per_s": rates.copy, "gemm_per_s": {str(d): r for d, r in rates.gemm.items()}}
    (out / "rates.json").write_text(json.dumps(facts, indent=2) + "\n")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            for row in measure(shape, dtype, "cuda", rates, deadline):
                rows.append(row)
                print(
                    f"{row.direction:9}{row.shape:18}{row.dtype:9}{row.method:20}{row.time_us:12.2f} us"
                    f"{row.times_floor:10.2f} x floor  error {row.error:.1e}",
                    flush=True,
                )
                write_csv(out / "linear_list.csv", rows)
    return 0


def topomad(out: Path) -> int:
    """Convert and train TopoMAD (in a process of its own) and write topomad.csv."""
    from benchmarks.gpu_topomad import measure_topomad

    rows = [row for nodes in (50, 200) for row in measure_topomad("cuda", nodes)]
    write_csv(out / "topomad.csv", rows)
    for row in rows:
        print(
            f"{row.nodes} nodes, {row.what}: {row.before_us:.0f} us -> {row.after_us:.0f} us, {row.verdict}"
        )
    moved = all(row.loss_after < row.loss_before for row in rows)
    print("training lowers the loss" if moved else "training does not lower the loss")
    return 0 if moved else 1


def summary(out: Path, facts: dict[str, Any], outcomes: list[tuple[str, str, float]]) -> str:
    """Everything on one page."""
    lines = [f"# {facts['card']}, torch {facts['torch']}, driver {facts['driver']}", ""]
    lines += [f"- {name}: {outcome}, {seconds:.0f} s" for name, outcome, seconds in outcomes]
    for name in ("linear_list", "topomad"):
        path = out / f"{name}.csv"
        if not path.is_file():
            continue
        with path.open() as file:
            rows = list(csv.reader(file))
        lines += ["", "| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
        lines += ["| " + " | ".join(_short(cell) for cell in row) + " |" for row in rows[1:]]
    return "\n".join(lines) + "\n"


def _short(cell: str) -> str:
    try:
        return cell if cell.isdigit() else f"{float(cell):.4g}"
    except ValueError:
        return cell


def main() -> int:
    """Run all steps; the exit code says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="for everything (default %(default)s)")
    parser.add_argument("--out", type=Path, help="the results folder (default benchmarks/results/gpu-...)")
    parser.add_argument("--only", choices=("benchmark", "topomad"), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=90.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"make gpu: no GPU found (torch {torch.__version__}, torch.version.cuda {torch.version.cuda})")
        return 3
    if options.only == "benchmark":
        return benchmark(options.out, options.seconds)
    if options.only == "topomad":
        return topomad(options.out)

    facts = machine()
    card = "-".join(facts["card"].lower().split())
    out = options.out or ROOT / "benchmarks" / "results" / time.strftime(f"gpu-{card}-%Y%m%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    (out / "machine.json").write_text(json.dumps(facts, indent=2) + "\n")
    steps = Steps(out, time.monotonic() + 60 * options.minutes)
    python = sys.executable
    built = steps.run(
        "build", [python, "-m", "fastlayers._build"], 120, TORCH_CUDA_ARCH_LIST=facts["capability"]
    )
    if built:
        pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        steps.run("tests-device", [*pytest, "tests/test_cuda_device.py"], 60)
        steps.run("tests-ops", [*pytest, "-p", "tests.on_cuda", "tests/test_ops.py", "-k", "not opcheck"], 60)
        steps.run("topomad", [python, __file__, "--only", "topomad", "--out", str(out)], 60)
        sanitizer = shutil.which("compute-sanitizer")
        for tool in ("memcheck", "racecheck") if sanitizer else ():
            command = [sanitizer, "--tool", tool, "--error-exitcode", "9", python, "-c", SANITIZED]
            steps.run(f"sanitizer-{tool}", command, 30, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        left = max(20.0, steps.deadline - time.monotonic() - 15)
        command = [python, __file__, "--only", "benchmark", "--out", str(out), "--seconds", str(left - 25)]
        steps.run("benchmark", command, left)
    text = summary(out, facts, steps.outcomes)
    (out / "summary.md").write_text(text)
    print(f"\n{text}\nwrote {out}")
    return 0 if all(outcome == "passed" for _, outcome, _ in steps.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
