"""TopoMAD on a GPU: convert it, verify it, and time a forward and a training step before and after."""

import time
from dataclasses import dataclass

import torch

import fastlayers
from benchmarks.gpu_timing import summarise
from fastlayers.convert import training_step
from models.topomad import GraphLSTMVAE


@dataclass(frozen=True)
class TopomadRow:
    """One line of the table: a whole model's step, called from Python."""

    nodes: int
    what: str
    before_us: float
    after_us: float
    rewrites: int
    verdict: str
    loss_before: float
    loss_after: float  # of the converted model after a few steps: training moves it


def measure_topomad(
    device: str, nodes: int, batch: int = 32, window: int = 5, steps: int = 10
) -> list[TopomadRow]:
    """Convert the paper's model of that many nodes, train both forms; times are medians of `steps` steps."""
    torch.manual_seed(0)
    model = GraphLSTMVAE("GCN", nodes, 8, 8, mode="paper").to(device)
    windows = torch.randn(batch, window, nodes, 8, device=device)
    ring = torch.arange(nodes, device=device)
    inputs = (windows, torch.stack([ring, ring.roll(-1)]))
    conversion = fastlayers.convert_model(model, inputs)
    loss_before = _loss(conversion.model, inputs)
    pairs = []
    for form in (model, conversion.model):

        def forward(form: torch.nn.Module = form) -> None:
            with torch.no_grad():
                form(*inputs)

        step = training_step(form, inputs)
        pairs.append((_median_us(forward, device, steps), _median_us(step, device, steps)))
    optimizer = torch.optim.Adam(conversion.model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        conversion.model(*inputs)[0].sub(windows).square().mean().backward()
        optimizer.step()
    facts = (
        len(conversion.rewrites),
        str(conversion.report.verdict),
        loss_before,
        _loss(conversion.model, inputs),
    )
    names = ("forward", "training step")
    return [
        TopomadRow(nodes, name, *times, *facts)
        for name, times in zip(names, zip(*pairs, strict=True), strict=True)
    ]


def _loss(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> float:
    with torch.no_grad():
        return float((model(*inputs)[0] - inputs[0]).square().mean())


def _median_us(run: object, device: str, repeats: int) -> float:
    assert callable(run)
    samples = []
    for k in range(repeats + 2):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        if k >= 2:
            samples.append((time.perf_counter() - start) * 1e6)
    return summarise(samples).median_us


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
