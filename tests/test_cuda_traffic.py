"""What the CUDA kernels ask of memory, counted in the emulation: evidence of coalescing without a GPU.

A block's tile is cut as for 10,000 linears, and run for a few of them. A sector is 32 bytes, the unit of
memory traffic; shared memory serves 32 banks of 4 bytes in a cycle.
"""

import re
from pathlib import Path

import pytest
import torch
from cuda_emulation.emulator import DTYPES, KERNELS, Emulator, Run, build_program, find_compiler
from test_cuda_emulation import make_case

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler ($CXX, g++, clang++)")
LIST = 10_000


@pytest.fixture
def trace(tmp_path: Path) -> Emulator:
    return Emulator(build_program("trace"), tmp_path)


def run_both(
    machine: Emulator, shape: tuple[int, int, int, int], dtype: torch.dtype, channel_last: bool = False
) -> tuple[Run, Run]:
    x, weight, bias, grad_out = make_case(shape, dtype)
    out = torch.empty(grad_out.mT.shape, dtype=dtype).mT if channel_last else torch.empty_like(grad_out)
    if channel_last:
        grad_out = grad_out.mT.contiguous().mT
    results = {"grad_x": torch.empty_like(x), "grad_weight": torch.empty_like(weight)}
    results["grad_bias"] = torch.empty_like(bias)
    forward = machine.run("forward", {"x": x, "weight": weight, "bias": bias}, {"out": out}, planned_n=LIST)
    inputs = {"grad_out": grad_out, "x": x, "weight": weight}
    backward = machine.run("backward", inputs, results, planned_n=LIST)
    assert forward.problems + backward.problems == []
    return forward, backward


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("features", "channel_last"),
    [(4, False), (7, False), (8, False), (16, False), (32, False), (7, True), (8, True)],
)
def test_every_sector_moves_once(
    trace: Emulator, features: int, channel_last: bool, dtype: torch.dtype
) -> None:
    """(32, 10000, F, F): all of x, grad_out, weights and results, and not one sector more."""
    plans = [trace.plan((32, LIST, features, features), dtype, backward) for backward in (False, True)]
    linears = max(plan["linears"] for plan in plans) * 2
    for run in run_both(trace, (32, linears, features, features), dtype, channel_last):
        for name, buffer in run.buffers.items():
            if name != "bias":  # each thread reads its own again, from the L1 cache
                assert buffer["sectors"] * 32 == buffer["used"], (name, buffer)


def test_rows_off_the_boundaries_cost_one_sector_each(trace: Emulator) -> None:
    """50 nodes of 7 float32 features: rows start anywhere, and still travel as 16-byte vectors."""
    rows, linears = 32, 50
    x, weight, bias, _ = make_case((rows, linears, 7, 7), torch.float32)
    out = torch.empty(rows, linears, 7)
    run = trace.run("forward", {"x": x, "weight": weight, "bias": bias}, {"out": out}, planned_n=LIST)
    tiles = -(-linears // trace.plan((rows, LIST, 7, 7), torch.float32, False)["linears"])
    for name in ("x", "out"):
        buffer = run.buffers[name]
        # A row of a tile has two ends; each may share its sector with a neighbour and travel as scalars.
        assert buffer["sectors"] <= buffer["used"] / 32 + rows * tiles * 6, (name, buffer)
    requests = run.buffers["x"]["requested"] / run.buffers["x"]["accesses"]
    assert requests > 128, "fewer bytes for each access of a warp than one element a lane gives"


@pytest.mark.parametrize(
    ("features", "reads"),
    # Reads of shared memory for 32 multiply-adds. Odd features are read one at a time, 8 rows for one weight;
    # features in fours as quads, 4 rows for four weights.
    [(7, (1.6, 3.5)), (8, (0.75, 1.6)), (16, (0.75, 1.3)), (32, (0.8, 1.1))],
)
def test_shared_memory_cycles(trace: Emulator, features: int, reads: tuple[float, float]) -> None:
    """Cycles of shared memory for each warp-wide multiply-add: what bounds the kernels after the bytes."""
    linears = 32
    forward, backward = run_both(trace, (32, linears, features, features), torch.float32)
    products = 32 * linears * features * features / 32
    assert forward.shared["cycles"] / products < reads[0]
    assert backward.shared["cycles"] / (2 * products) < reads[1] / 2 + 0.2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plans_keep_their_limits(trace: Emulator, dtype: torch.dtype) -> None:
    text = (KERNELS / "linear_list_plan.h").read_text()
    threads, limit = int(re.search(r"kThreads = (\d+)", text)[1]), 48 * 1024
    for rows, linears in ((1, 1), (32, 50), (32, LIST), (5000, 64), (100_000, 3)):
        for i, o in ((1, 1), (7, 7), (8, 19), (32, 32), (1, 32), (31, 2)):
            for backward in (False, True):
                for vectors in (False, True):
                    plan = trace.plan((rows, linears, i, o), dtype, backward, vectors)
                    assert plan["shared_bytes"] <= limit
                    assert (
                        plan["linears"] * plan["blocks"] >= linears > plan["linears"] * (plan["blocks"] - 1)
                    )
                    assert 1 <= plan["row_blocks"] <= -(-rows // plan["rows"])
                    assert plan["row_blocks"] == 1 or not backward
                    assert not backward or plan["linears"] * (-(-i // 4)) * (-(-o // 4)) <= threads


def test_the_choice_of_kernel(trace: Emulator) -> None:
    def fits(shape: tuple[int, int, int, int], backward: bool) -> bool:
        return trace.plan(shape, torch.float32, backward)["fits"]

    assert fits((32, LIST, 7, 7), False) and fits((32, LIST, 32, 32), True)
    assert not fits((32, LIST, 33, 7), False) and not fits((32, LIST, 7, 33), True)
    assert fits((4096, 2, 8, 8), True) and not fits((4097, 63, 8, 8), True) and fits((4097, 64, 8, 8), True)
