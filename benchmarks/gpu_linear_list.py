"""LinearList on a GPU beside its peers, each result verified before it is timed, each time beside its floor.

Run by `benchmarks/gpu.py`. Peers: the loop over nn.Linear, the same in a CUDA graph, bmm, baddbmm, einsum and
`(weight * x).sum(-1) + bias` compiled. All but the plain loop are timed as replays of a CUDA graph, so that
no launch overhead of Python is compared; `eager` is our op called from Python.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_timing import REPEATS, Rates, rotating, time_calls
from fastlayers import ops

# (B, N, I, O): the size, TopoMAD's heads, fours, the largest tiny size, many rows, one for the GEMMs.
SHAPES = [
    (32, 10_000, 7, 7),
    (32, 10_000, 8, 8),
    (32, 200, 8, 19),
    (32, 2_000, 32, 32),
    (4_096, 200, 8, 8),
    (256, 64, 64, 64),
]


@dataclass(frozen=True)
class Row:
    """One line of the result table."""

    direction: str
    shape: str
    dtype: str
    method: str
    time_us: float
    lower_us: float
    upper_us: float
    floor_us: float
    times_floor: float
    error: float  # ||result - float64|| / ||float64||
    setup_s: float  # compiling, capturing


def draw(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """x, weight, bias and grad_out."""
    b, n, i, o = shape
    generator = torch.Generator(device).manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    return random(b, n, i), random(n, o, i), random(n, o), random(b, n, o)


def loop(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What the module list does."""
    return torch.stack([F.linear(x[:, k], weight[k], bias[k]) for k in range(len(weight))], 1)


def loop_backward(grad_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The three products that each linear's backward is, one linear after another."""
    grads = [
        (g @ w, g.T @ u, g.sum(0)) for g, u, w in zip(grad_out.unbind(1), x.unbind(1), weight, strict=True)
    ]
    grad_x, grad_weight, grad_bias = zip(*grads, strict=True)
    return torch.stack(grad_x, 1), torch.stack(grad_weight), torch.stack(grad_bias)


def bmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (torch.bmm(x.transpose(0, 1), weight.mT) + bias.unsqueeze(1)).transpose(0, 1).contiguous()


def baddbmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias.unsqueeze(1), x.transpose(0, 1), weight.mT).transpose(0, 1).contiguous()


def einsum(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum("bni,noi->bno", x, weight) + bias


def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (weight * x.unsqueeze(-2)).sum(-1) + bias


def bmm_backward(grad_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    g = grad_out.transpose(0, 1)
    grad_x = torch.bmm(g, weight).transpose(0, 1).contiguous()
    return grad_x, torch.bmm(g.mT, x.transpose(0, 1)), grad_out.sum(0)


def einsum_backward(grad_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    grad_x = torch.einsum("bno,noi->bni", grad_out, weight)
    return grad_x, torch.einsum("bno,bni->noi", grad_out, x), grad_out.sum(0)


def formula_backward(grad_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    grad_x = (weight * grad_out.unsqueeze(-1)).sum(-2)
    return grad_x, (grad_out.unsqueeze(-1) * x.unsqueeze(-2)).sum(0), grad_out.sum(0)


def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ops.linear_list(x, weight, bias)


def fused_backward(grad_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.fastlayers.linear_list_backward(grad_out, x, weight, True, True, True)


METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    "forward": {
        "linear_list": fused,
        "linear_list, eager": fused,
        "baddbmm": baddbmm,
        "bmm": bmm,
        "einsum": einsum,
        "compiled": formula,
        "loop, graph": loop,
        "loop": loop,
    },
    "backward": {
        "linear_list": fused_backward,
        "linear_list, eager": fused_backward,
        "bmm": bmm_backward,
        "einsum": einsum_backward,
        "compiled": formula_backward,
        "loop, graph": loop_backward,
        "loop": loop_backward,
    },
}
EAGER = ("linear_list, eager", "loop")


def work(shape: tuple[int, int, int, int], itemsize: int, direction: str) -> tuple[int, int]:
    """Fewest bytes moved (inputs read once, results written once), and operations (2 for a multiply-add)."""
    b, n, i, o = shape
    x, out, weight, bias = b * n * i, b * n * o, n * o * i, n * o
    if direction == "forward":
        return (x + weight + bias + out) * itemsize, 2 * b * n * i * o
    return (out + x + weight + x + weight + bias) * itemsize, 4 * b * n * i * o


def error_of(result: Any, exact: Any) -> float:
    """The largest relative error of the tensors, in the norm of each."""
    results = result if isinstance(result, tuple) else (result,)
    exacts = exact if isinstance(exact, tuple) else (exact,)
    return max(float((r.double() - e).norm() / e.norm()) for r, e in zip(results, exacts, strict=True))


def measure(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, rates: Rates, deadline: float
) -> Iterator[Row]:
    """Verify and time every method on one shape, both directions; after the deadline our own alone."""
    for direction, methods in METHODS.items():
        moved, operations = work(shape, dtype.itemsize, direction)
        floor = rates.floor_us(moved, operations, dtype)

        def make(seed: int, direction: str = direction) -> tuple[Tensor, ...]:
            x, weight, bias, grad_out = draw(shape, dtype, device, seed)
            return (x, weight, bias) if direction == "forward" else (grad_out, x, weight)

        sets = rotating(make, device)
        wide = tuple(t.double() for t in sets[0])
        exact = einsum(*wide) if direction == "forward" else einsum_backward(*wide)
        del wide
        # More than 32,768 rounded sums of random signs stay far below this: it catches wrong results only.
        wrong = 64 * torch.finfo(dtype).eps
        for name, function in methods.items():
            if time.monotonic() > deadline and not name.startswith("linear_list"):
                continue
            many = name.startswith("loop") and shape[1] * len(sets) > 20_000  # launches to capture
            start = time.perf_counter()
            compiles = name == "compiled" and device != "cpu"
            called = torch.compile(function, dynamic=False) if compiles else function
            error = error_of(called(*sets[0]), exact)
            if not error < wrong:
                raise AssertionError(f"{direction} {shape} {dtype} {name}: relative error {error:.2e}")
            repeats = 3 if name == "loop" else REPEATS
            timing = time_calls(called, sets[:1] if many else sets, graph=name not in EAGER, repeats=repeats)
            setup = time.perf_counter() - start
            yield Row(
                direction,
                "x".join(map(str, shape)),
                str(dtype).removeprefix("torch."),
                name,
                timing.median_us,
                timing.lower_us,
                timing.upper_us,
                floor,
                timing.median_us / floor,
                error,
                setup,
            )
