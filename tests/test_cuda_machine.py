"""The emulation itself: it notices faults in a small kernel of its own, and in mutilated copies of ours."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from cuda_emulation.emulator import KERNELS, Emulator, build_program, find_compiler
from test_cuda_emulation import FORWARD_ORDERS, make_case, run_backward, run_forward

from fastlayers.equivalence import LinearResult, assert_linear_as_accurate

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler ($CXX, g++, clang++)")


@pytest.fixture
def trace(tmp_path: Path) -> Emulator:
    return Emulator(build_program("trace"), tmp_path)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none", None),
        ("no barrier", "race"),
        ("barrier in a branch", "never reach"),
        ("unwritten", "nobody has written"),
        ("a result left out", "not written everywhere"),
        ("written twice", "written twice"),
    ],
)
def test_the_machine_notices(trace: Emulator, fault: str, message: str | None) -> None:
    values, report = trace.call("selftest", fault).strip().splitlines()
    problems = json.loads(report)["problems"]
    if message is None:
        assert problems == []
        assert [int(v) for v in values.split()] == [(k + 1) % 64 for k in range(64)]
    else:
        assert any(message in problem for problem in problems), problems


def test_the_machine_notices_an_access_outside(tmp_path: Path) -> None:
    machine = Emulator(build_program("address"), tmp_path)
    machine.call("selftest", "none")
    with pytest.raises(RuntimeError, match="heap-buffer-overflow"):
        machine.call("selftest", "outside")


def test_shuffles(trace: Emulator) -> None:
    values = [int(v) for v in trace.call("selftest", "shuffle").splitlines()[0].split()]
    for thread, value in enumerate(values):
        first = thread // 32 * 32
        below = thread + 1 if thread % 32 < 31 else thread
        assert value == sum(range(first, first + 32)) + 10_000 * below + 1_000_000 * (first + 5)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_half_types_convert_as_in_torch(trace: Emulator, tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    (tmp_path / "bits").write_bytes(bits.numpy().tobytes())
    trace.call("convert", str(dtype).removeprefix("torch."), str(tmp_path / "bits"))
    wide = torch.frombuffer(bytearray((tmp_path / "bits.wide").read_bytes()), dtype=torch.float32)
    narrow = torch.frombuffer(bytearray((tmp_path / "bits.narrow").read_bytes()), dtype=dtype)
    assert torch.equal(wide.nan_to_num(nan=7.5), bits.view(dtype).float().nan_to_num(nan=7.5))
    expected = (wide * 1.00390625).to(dtype)
    assert torch.equal(narrow.isnan(), expected.isnan())
    assert torch.equal(narrow.nan_to_num(nan=7.5), expected.nan_to_num(nan=7.5))


# What to break in linear_list_kernel.cuh: the text, its replacement, which of its occurrences, how it shows.
FAULTS = {
    "no wait for the copies": ("wait_for_copies();", "", 0, "nobody has written|never waited"),
    "no barrier after staging": ("wait_for_copies();\n    __syncthreads();", "wait_for_copies();", 0, "race"),
    "no barrier after staging, backward": (
        "wait_for_copies();\n    __syncthreads();",
        "wait_for_copies();",
        1,
        "race",
    ),
    "no barrier before the next tile": ("if (!first) __syncthreads();", "", 0, "race"),
    "no barrier before the next tile, backward": ("if (first_row > 0) __syncthreads();", "", 0, "race"),
    "no barrier before the shares are summed": (
        "grad_tile.share(shares);\n  __syncthreads();",
        "grad_tile.share(shares);",
        0,
        "race",
    ),
    "one row too many": ("if (r < rows) to[", "if (r <= rows) to[", 0, "written twice|no buffer"),
    "one row too few": ("if (r < rows) to[", "if (r < rows - 1) to[", 0, "not written everywhere"),
    "a tile beyond the list": (
        "min(int64_t{tile.linears}, shape.linears - first_linear)",
        "tile.linears",
        0,
        "no buffer|written twice",
    ),
    "the row's stride is its length": (
        "source + r * row_stride",
        "source + r * length",
        0,
        "misaligned|beyond the hard bound",
    ),
    "a misaligned start forgotten": (
        "+ ((shift + r * shift_step) & shift_mask)",
        "+ 0 * shift",
        0,
        "misaligned",
    ),
    "one window too few": (
        "+ length + size - 1) / size",
        "+ length) / size",
        0,
        "nobody has written|hard bound",
    ),
    "one group of rows too few": (
        "g < kThreads / tasks",
        "g < kThreads / tasks - 1",
        0,
        "beyond the hard bound",
    ),
    "the bias of another linear": ("bias[n * columns.features + f]", "bias[f]", 0, "beyond the hard bound"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(tmp_path: Path, fault: str) -> None:
    text, replacement, occurrence, message = FAULTS[fault]
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels)
    header = kernels / "linear_list_kernel.cuh"
    parts = header.read_text().split(text)
    assert len(parts) > occurrence + 1, (
        f"{text!r} is not in {header.name} any more: plant the fault elsewhere"
    )
    header.write_text(text.join(parts[: occurrence + 1]) + replacement + text.join(parts[occurrence + 1 :]))
    machine = Emulator(build_program("trace", kernels, fault), tmp_path)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        run_everything(machine)


def test_without_a_fault_nothing_shows(trace: Emulator) -> None:
    run_everything(trace)


def run_everything(machine: Emulator) -> None:
    """Run both kernels over a tail in every direction, every order, and rows that start off a boundary.

    Cut as for 10,000 linears, a block has a dozen of them and several tiles of rows.
    """
    x, weight, bias, grad_out = make_case((130, 12, 5, 6), torch.float32)
    longer = torch.zeros(130, 16, 5)
    longer[:, 3:15] = x
    x = longer[:, 3:15]
    for order in FORWARD_ORDERS:
        forward = run_forward(machine, x, weight, bias, order=order, planned_n=10_000)
        backward = run_backward(machine, grad_out, x, weight, order=order, planned_n=10_000)
        assert forward.problems + backward.problems == [], "; ".join(forward.problems + backward.problems)
        result = LinearResult(forward.results["out"], **backward.results)
        assert_linear_as_accurate(result, None, x, weight, bias, grad_out)
