"""The main job, end to end: convert a trained TopoMAD, verify it, time it, and write everything down.

    python -m examples.demo                       a simulated system of 200 services, trained for a moment
    python -m examples.demo --checkpoint FILE     a checkpoint of the authors' code, on made-up windows

It writes to demo_output/: the report (report.json, report.png) and the converted checkpoint
(converted.safetensors).
"""

import argparse
import json
import multiprocessing
import platform
import queue
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastlayers
from models.topomad import GraphLSTMVAE, load_paper_checkpoint
from models.topomad.simulate import simulate
from models.topomad.training import PAPER_SETTINGS, Trainer

WINDOW, BATCH = 5, 32


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer nodes, less training, shorter timing")
    parser.add_argument("--nodes", type=int, help="services of the simulated system (default 200; quick: 50)")
    parser.add_argument(
        "--compile-limit",
        type=float,
        metavar="SECONDS",
        help="for torch.compile of the original (default 60; quick: 20; 0: left out)",
    )
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint of the authors' TopoMAD")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="where the results go")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.checkpoint is None:
        nodes = options.nodes or (50 if options.quick else 200)
        path = options.out / "trained.pt"
        windows, edges = train_and_save(nodes, 1 if options.quick else 2, path)
    else:
        path = options.checkpoint
        windows, edges = made_up_inputs(path)

    say(f"loading {path}")
    model = load_paper_checkpoint(path)
    inputs = (windows, edges)
    say("converting and verifying")
    start = time.perf_counter()
    conversion = fastlayers.convert_model(model, inputs)
    say(f"done in {time.perf_counter() - start:.1f} s; timing")
    conversion.measure(model, inputs, seconds=1.0 if options.quick else 3.0)
    limit = options.compile_limit if options.compile_limit is not None else 20.0 if options.quick else 60.0
    say(f"timing torch.compile of the original, at most {limit:.0f} s")
    compiled = time_compiled(path, inputs, limit)

    print(f"\n{conversion}")
    print(compiled_rows(compiled))
    print(f"\nbatch {len(windows)}, window {windows.shape[1]}, {machine()}")
    conversion.save(options.out / "converted.safetensors")
    facts = {**json.loads(conversion.to_json()), "torch_compile": compiled, "machine": machine()}
    (options.out / "report.json").write_text(json.dumps(facts, indent=2) + "\n")
    plot(conversion, options.out / "report.png")
    print(f"wrote {', '.join(sorted(str(p) for p in options.out.iterdir()))}")
    return 0


def say(text: str) -> None:
    """Progress goes to standard error, the result to standard output."""
    print(text, file=sys.stderr, flush=True)


def train_and_save(nodes: int, epochs: int, path: Path) -> tuple[Tensor, Tensor]:
    """Train a TopoMAD written the usual way on a simulated system; return one batch of its windows."""
    from tqdm import tqdm

    say(f"simulating a system of {nodes} services")
    system = simulate(nodes, 400, num_faults=5)
    values = (system.values - system.values.mean(0)) / system.values.std(0).clamp(min=1e-3)
    torch.manual_seed(0)
    model = GraphLSTMVAE("GCN", nodes, values.shape[2], 8, mode="paper")
    clean = values[:200]
    steps = epochs * -(-(len(clean) - WINDOW + 1) // BATCH)
    with tqdm(total=steps, desc="training", file=sys.stderr, disable=None) as bar:
        settings = replace(
            PAPER_SETTINGS,
            window=WINDOW,
            epochs=epochs,
            batch_size=BATCH,
            learning_rate=1e-2,
            validation_share=0.0,
        )
        Trainer(model, clean, system.edge_index, settings, on_step=lambda loss: bar.update()).run()
    torch.save(model.state_dict(), path)
    return torch.stack([clean[t : t + WINDOW] for t in range(BATCH)]), system.edge_index


def made_up_inputs(path: Path) -> tuple[Tensor, Tensor]:
    """Windows of noise and a ring of nodes, of the sizes that a checkpoint asks for."""
    model = load_paper_checkpoint(path)
    windows = torch.randn(
        BATCH, WINDOW, model.num_nodes, model.in_features, generator=torch.Generator().manual_seed(0)
    )
    ring = torch.arange(model.num_nodes)
    return windows, torch.stack([ring, ring.roll(-1)])


def time_compiled(path: Path, inputs: tuple[Any, ...], limit: float) -> dict[str, Any]:
    """Time torch.compile of the original in a process of its own, which ends when the limit is over."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_compile_and_time, args=(str(path), inputs, results), daemon=True)
    process.start()
    found: dict[str, Any] = {"limit_s": limit}
    end = time.monotonic() + limit
    while time.monotonic() < end and "training_step_ms" not in found and "error" not in found:
        try:
            found.update(results.get(timeout=0.2))
        except queue.Empty:
            if not process.is_alive():
                break
    process.kill()
    process.join()
    return found


def _compile_and_time(path: str, inputs: tuple[Any, ...], results: Any) -> None:
    from fastlayers.convert import training_step

    try:
        model = load_paper_checkpoint(path)
        torch._dynamo.config.recompile_limit = 64  # the helper is compiled once for each list it serves
        compiled = torch.compile(model)
        start = time.perf_counter()
        with torch.no_grad():
            compiled(*inputs)
        results.put({"forward_setup_s": time.perf_counter() - start})
        with torch.no_grad():
            results.put({"forward_ms": median_ms(lambda: compiled(*inputs))})
        start = time.perf_counter()
        step = training_step(compiled, inputs)
        step()
        results.put({"training_setup_s": time.perf_counter() - start})
        results.put({"training_step_ms": median_ms(step)})
    except Exception as error:
        results.put({"error": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"})


def median_ms(run: Callable[[], Any]) -> float:
    """The median of about two seconds of runs."""
    taken: list[float] = []
    end = time.perf_counter() + 2.0
    while len(taken) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def compiled_rows(found: dict[str, Any]) -> str:
    """The rows of torch.compile: its times and what it took to get there, or that it did not get there."""
    lines = []
    for name, key in (("forward", "forward"), ("training step", "training")):
        took = found.get("forward_ms" if key == "forward" else "training_step_ms")
        if took is not None:
            text = f"{took:.3g} ms, after {found[f'{key}_setup_s']:.0f} s of compiling"
        else:
            text = found.get("error", f"not compiled within {found['limit_s']:.0f} s")
        lines.append(f"original under torch.compile, {name}: {text}")
    return "\n".join(lines)


def machine() -> str:
    """What the times were taken on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        name = models[0] if models else name
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def layer_errors(conversion: fastlayers.Conversion) -> dict[str, tuple[float, float]]:
    """For each fused layer the largest error of the original and its own, as the verifier measured them."""
    errors = {rewrite.into: (0.0, 0.0) for rewrite in conversion.rewrites}
    for c in conversion.report.comparisons:
        layer = c.name.split(" ")[0]
        if c.kind == "linear list" and layer in errors:
            before, after = errors[layer]
            errors[layer] = max(before, c.judgement.error_original), max(after, c.judgement.error_new)
    return errors


def plot(conversion: fastlayers.Conversion, path: Path) -> None:
    """Error and time of each layer, before and after, as one picture."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    times = conversion.measurement.layers
    errors = layer_errors(conversion)
    names = [t.name for t in times]
    rows = range(len(names))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 1.6 + 0.5 * len(names)), sharey=True)
    for axes, before, after, title in (
        (left, [errors[n][0] for n in names], [errors[n][1] for n in names], "error (units of rounding)"),
        (right, [t.before_ms for t in times], [t.after_ms for t in times], "time (ms)"),
    ):
        axes.barh([r - 0.2 for r in rows], before, 0.38, label="loop of Linears", color="#8a8f98")
        axes.barh([r + 0.2 for r in rows], after, 0.38, label="fused", color="#1f77b4")
        axes.set_xlabel(title)
    left.set_yticks(list(rows), names)
    left.invert_yaxis()
    right.set_xscale("log")
    right.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
