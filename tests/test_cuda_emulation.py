"""The CUDA kernels' own source, run on the CPU by `cuda_emulation`: right numbers, no races, no stray access.

Inputs and results lie in heap buffers of exactly their size. The judge compares with float64 and with a loop.
"""

from pathlib import Path

import pytest
import torch
from cuda_emulation.emulator import DTYPES, Emulator, Run, build_program, find_compiler
from torch import Tensor

from fastlayers.equivalence import LinearResult, assert_linear_as_accurate

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler ($CXX, g++, clang++)")

# (B, N, I, O): ones, odd sizes, TopoMAD's 50 nodes, tails of rows and of the list, N = 1, wide, no rows.
SHAPES = [
    (1, 1, 1, 1),
    (5, 3, 7, 7),
    (2, 50, 8, 19),
    (33, 19, 7, 5),
    (67, 5, 3, 9),
    (35, 9, 16, 1),
    (3, 130, 1, 2),
    (9, 1, 32, 32),
    (34, 6, 4, 12),
    (0, 4, 3, 5),
]
FORWARD_ORDERS = (0, 1, 2)  # the threads of a block in order, reversed, shuffled anew after each barrier


@pytest.fixture(params=["trace", "address"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Emulator:
    return Emulator(build_program(request.param), tmp_path)


@pytest.fixture
def trace(tmp_path: Path) -> Emulator:
    return Emulator(build_program("trace"), tmp_path)


def make_case(
    shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and grad_out of a (B, N, I, O) call."""
    b, n, i, o = shape
    g = torch.Generator().manual_seed(seed)
    sizes = ((b, n, i), (n, o, i), (n, o), (b, n, o))
    x, weight, bias, grad_out = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in sizes)
    return x, weight, bias, grad_out


def run_forward(
    machine: Emulator,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    channel_last: bool = False,
    order: int = 0,
    planned_n: int | None = None,
) -> Run:
    shape = (x.shape[0], weight.shape[0], weight.shape[1])
    out = torch.empty(shape, dtype=x.dtype)
    if channel_last:
        out = torch.empty((shape[0], shape[2], shape[1]), dtype=x.dtype).mT
    return machine.run("forward", {"x": x, "weight": weight, "bias": bias}, {"out": out}, order, planned_n)


def run_backward(
    machine: Emulator,
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    wanted: str = "x weight bias",
    channel_last: bool = False,
    order: int = 0,
    planned_n: int | None = None,
) -> Run:
    results = {
        "grad_x": torch.empty(x.mT.shape, dtype=x.dtype).mT
        if channel_last
        else torch.empty(x.shape, dtype=x.dtype),
        "grad_weight": torch.empty_like(weight),
        "grad_bias": torch.empty(weight.shape[:2], dtype=x.dtype),
    }
    results = {name: t for name, t in results.items() if name.removeprefix("grad_") in wanted.split()}
    return machine.run(
        "backward", {"grad_out": grad_out, "x": x, "weight": weight}, results, order, planned_n
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_agree_with_the_reference(
    machine: Emulator, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    x, weight, bias, grad_out = make_case(shape, dtype)
    runs = [
        run_forward(machine, x, weight, bias, order=1),
        run_backward(machine, grad_out, x, weight, order=2),
    ]
    assert [run.problems for run in runs] == [[], []]
    result = LinearResult(runs[0].results["out"], **runs[1].results)
    assert_linear_as_accurate(result, None, x, weight, bias, grad_out)


def test_the_order_of_the_threads_changes_nothing(trace: Emulator) -> None:
    x, weight, bias, grad_out = make_case((40, 11, 5, 6), torch.float32)
    forward = [run_forward(trace, x, weight, bias, order=k) for k in FORWARD_ORDERS]
    backward = [run_backward(trace, grad_out, x, weight, order=k) for k in FORWARD_ORDERS]
    for runs in (forward, backward):
        for run in runs[1:]:
            for name, t in run.results.items():
                assert torch.equal(t, runs[0].results[name]), name


def views(shape: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
    """The same call on operands that lie in memory in other ways."""
    x, weight, bias, grad_out = make_case(shape, dtype)

    def in_series(t: Tensor) -> Tensor:  # one time step of (B, T, N, F)
        series = torch.zeros(t.shape[0], 3, *t.shape[1:], dtype=dtype)
        series[:, 1] = t
        return series[:, 1]

    def shifted(t: Tensor) -> Tensor:  # starts one element after a vector boundary
        flat = torch.zeros(t.numel() + 1, dtype=dtype)
        flat[1:] = t.flatten()
        return flat[1:].view(t.shape)

    def every_second(t: Tensor) -> Tensor:
        return t.repeat_interleave(2, 1)[:, ::2]

    constant = torch.randn((), generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return {
        "series": (in_series(x), weight, bias, in_series(grad_out)),
        "shifted": tuple(shifted(t) for t in (x, weight, bias, grad_out)),
        "list strided": (every_second(x), weight, bias, every_second(grad_out)),
        "channel last": (x.mT.contiguous().mT, weight, bias, grad_out.mT.contiguous().mT),
        "features strided": (torch.stack([x, x], -1)[..., 0], weight, bias, grad_out),
        "expanded": (x[:1].expand(x.shape), weight, bias, constant.expand(grad_out.shape)),
    }


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("view", views((1, 1, 1, 1), torch.float32))
@pytest.mark.parametrize("channel_last", (False, True))
def test_any_strides(machine: Emulator, view: str, channel_last: bool, dtype: torch.dtype) -> None:
    for shape in ((34, 10, 7, 6), (3, 5, 8, 4)):
        x, weight, bias, grad_out = views(shape, dtype)[view]
        runs = [
            run_forward(machine, x, weight, bias, channel_last),
            run_backward(machine, grad_out, x, weight, channel_last=channel_last),
        ]
        assert [run.problems for run in runs] == [[], []]
        result = LinearResult(runs[0].results["out"], **runs[1].results)
        assert_linear_as_accurate(result, None, x, weight, bias, grad_out)


@pytest.mark.parametrize("wanted", ("x", "weight", "bias", "x weight", "x bias", "weight bias"))
def test_backward_writes_what_is_wanted(machine: Emulator, wanted: str) -> None:
    x, weight, bias, grad_out = make_case((37, 5, 3, 6), torch.float32)
    run = run_backward(machine, grad_out, x, weight, wanted)
    assert run.problems == []
    assert_linear_as_accurate(LinearResult(**run.results), None, x, weight, bias, grad_out)
    if "weight" not in wanted:
        assert run.buffers["x"]["used"] == 0


def test_a_forward_without_bias(machine: Emulator) -> None:
    x, weight, _, _ = make_case((6, 3, 5, 4), torch.bfloat16)
    run = run_forward(machine, x, weight, None)
    assert run.problems == []
    assert_linear_as_accurate(LinearResult(run.results["out"]), None, x, weight)


def test_nan_and_inf_stay_in_their_linear(trace: Emulator) -> None:
    x, weight, bias, grad_out = make_case((9, 4, 7, 3), torch.float32)
    x[2, 1, 3], x[4, 2, 0] = float("nan"), float("inf")
    result = LinearResult(
        run_forward(trace, x, weight, bias).results["out"], **run_backward(trace, grad_out, x, weight).results
    )
    assert_linear_as_accurate(result, None, x, weight, bias, grad_out)
    assert result.output is not None and result.output[:, (0, 3)].isfinite().all()
