"""Time device work: events around replays of a CUDA graph that walks through rotating buffers.

Also the two rates that give a floor, measured on the card itself: a large copy and large matrix products.
On the CPU everything runs too, timed with a clock, so that a test can run the benchmarks without a GPU.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 3
REPEATS = 15


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of the repeats and their quartiles."""

    median_us: float
    lower_us: float
    upper_us: float


def summarise(samples_us: Sequence[float]) -> Timing:
    """The median and quartiles of some samples."""
    if len(samples_us) < 2:
        return Timing(*[samples_us[0]] * 3)
    quartiles = statistics.quantiles(samples_us, n=4, method="inclusive")
    return Timing(quartiles[1], quartiles[0], quartiles[2])


def rotating(make: Callable[[int], tuple[Any, ...]], device: str) -> list[tuple[Any, ...]]:
    """As many sets of arguments as exceed twice the L2 cache, so that no call finds its inputs there."""
    first = make(0)
    if device == "cpu":
        return [first, make(1)]
    used = sum(t.numel() * t.element_size() for t in first if isinstance(t, Tensor))
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return [first, *(make(k) for k in range(1, min(64, max(2, 1 + 2 * cache // max(used, 1)))))]


def time_calls(
    function: Callable[..., Any], sets: list[tuple[Any, ...]], *, graph: bool = True, repeats: int = REPEATS
) -> Timing:
    """Time `function(*arguments)` over all sets in turn, as one CUDA graph or call by call."""
    device = next(t.device.type for t in sets[0] if isinstance(t, Tensor))
    for k in range(WARM_UPS):
        function(*sets[k % len(sets)])
    if device == "cpu":
        return summarise([_clock(function, sets) for _ in range(2)])

    def round_trip() -> None:
        for arguments in sets:
            function(*arguments)

    replay: Callable[[], Any] = round_trip
    if graph:
        captured = capture(round_trip)
        replay = captured.replay
    replay()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / len(sets))
    return summarise(samples)


def capture(run: Callable[[], Any]) -> "torch.cuda.CUDAGraph":
    """Capture `run` in a CUDA graph, after a warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _clock(function: Callable[..., Any], sets: list[tuple[Any, ...]]) -> float:
    start = time.perf_counter()
    for arguments in sets:
        function(*arguments)
    return (time.perf_counter() - start) * 1e6 / len(sets)


@dataclass(frozen=True)
class Rates:
    """What the card gives: bytes per second of a copy (read and written), operations per second of a GEMM."""

    copy: float
    gemm: dict[torch.dtype, float]

    def floor_us(self, moved_bytes: int, operations: int, dtype: torch.dtype) -> float:
        """No version is faster than its bytes at the copy's rate, or its operations at the GEMM's."""
        return max(moved_bytes / self.copy, operations / self.gemm[dtype]) * 1e6


def measure_rates(device: str, dtypes: Sequence[torch.dtype]) -> Rates:
    """Measure a device-to-device copy and square matrix products of random data."""
    small = device == "cpu"
    source = torch.randn(2**16 if small else 2**28, device=device)
    sets = [(torch.empty_like(source), source)]
    copy = time_calls(lambda to, x: to.copy_(x), sets)
    size = 64 if small else 4096
    gemm = {}
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        took = time_calls(lambda p, q, out: torch.mm(p, q, out=out), [(a, b, torch.empty_like(a))])
        gemm[dtype] = 2 * size**3 / (took.median_us * 1e-6)
    return Rates(2 * source.numel() * 4 / (copy.median_us * 1e-6), gemm)
