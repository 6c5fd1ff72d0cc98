"""The GPU benchmarks, run on the CPU: that they verify what they time, and what they do without a GPU."""

import csv
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cuda_emulation.emulator import ROOT

from benchmarks import gpu, gpu_linear_list, gpu_timing, gpu_topomad

SHAPE = (5, 6, 7, 3)


@pytest.fixture(scope="module")
def rates() -> gpu_timing.Rates:
    return gpu_timing.measure_rates("cpu", (torch.float32, torch.bfloat16))


def test_every_method_is_verified_and_timed(rates: gpu_timing.Rates, tmp_path: Path) -> None:
    rows = list(gpu_linear_list.measure(SHAPE, torch.float32, "cpu", rates, time.monotonic() + 60))
    methods = [(d, name) for d, methods in gpu_linear_list.METHODS.items() for name in methods]
    assert [(row.direction, row.method) for row in rows] == methods
    assert all(row.time_us > 0 and row.times_floor == row.time_us / row.floor_us for row in rows)
    gpu.write_csv(tmp_path / "linear_list.csv", rows)
    with (tmp_path / "linear_list.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    text = gpu.summary(tmp_path, {"card": "C", "torch": "T", "driver": "D"}, [("build", "passed", 1.0)])
    assert text.startswith("# C, torch T, driver D") and "| forward | 5x6x7x3 | float32 | baddbmm |" in text


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_method_is_not_timed(
    direction: str, rates: gpu_timing.Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gpu_linear_list.METHODS[direction]["einsum"]

    def wrong(*arguments: torch.Tensor) -> object:
        result = right(*arguments)
        return result + 1e-3 if direction == "forward" else (result[0], 1.001 * result[1], result[2])

    monkeypatch.setitem(gpu_linear_list.METHODS[direction], "einsum", wrong)
    with pytest.raises(AssertionError, match=f"{direction}.*einsum: relative error"):
        list(gpu_linear_list.measure(SHAPE, torch.float32, "cpu", rates, time.monotonic() + 60))


def test_after_the_deadline_the_peers_are_left_out(rates: gpu_timing.Rates) -> None:
    rows = gpu_linear_list.measure(SHAPE, torch.float32, "cpu", rates, time.monotonic() - 1)
    assert {row.method for row in rows} == {"linear_list", "linear_list, eager"}


def test_floors() -> None:
    moved, operations = gpu_linear_list.work((32, 10_000, 7, 7), 4, "forward")
    assert moved == 4 * (2 * 32 * 10_000 * 7 + 10_000 * 7 * 8)
    assert operations == 2 * 32 * 10_000 * 49
    rates = gpu_timing.Rates(copy=4e12, gemm={torch.float32: 5e13})
    assert rates.floor_us(4_000_000, 0, torch.float32) == pytest.approx(1.0)
    assert rates.floor_us(0, 50_000_000, torch.float32) == pytest.approx(1.0)


def test_topomad_is_converted_and_trained() -> None:
    rows = gpu_topomad.measure_topomad("cpu", 5, batch=3, window=2, steps=3)
    assert [row.what for row in rows] == ["forward", "training step"]
    assert all(row.rewrites == 4 and row.loss_after < row.loss_before for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, "benchmarks/gpu.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3 and done.stderr == ""
    assert done.stdout.startswith("make gpu: no GPU found (torch ") and done.stdout.count("\n") == 1
