"""Every CUDA source compiles for every architecture without warnings or spills, to the accesses we meant."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_emulation.emulator import KERNELS, ROOT

from fastlayers import _build


def find_nvcc(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FORCE_CUDA", "1")
    try:
        return _build.find_nvcc(_build.find_torch())
    except _build.BuildError as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_all_architectures_compile_without_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    find_nvcc(monkeypatch)
    done = subprocess.run([sys.executable, "scripts/cuda_check.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 kernels, no warnings, 0 with spills" in done.stdout  # 2 kernels, 4 dtypes, 3 architectures


def test_the_check_reads_spills() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    from cuda_check import read_report

    report = """ptxas info    : Compiling entry function '_Z1fv' for 'sm_90'
    ptxas info    : Function properties for _Z1fv
        24 bytes stack frame, 16 bytes spill stores, 28 bytes spill loads
    ptxas info    : Used 72 registers, used 1 barriers, 24 bytes cumulative stack size, 64 bytes smem
    ptxas info    : Compiling entry function '_Z1gv' for 'sm_90'
        0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info    : Used 80 registers, used 1 barriers"""
    spilled, clean = read_report(report, 90)
    assert (spilled.registers, spilled.shared_bytes, spilled.stack_bytes) == (72, 64, 24)
    assert (spilled.spill_store_bytes, spilled.spill_load_bytes) == (16, 28)
    assert (clean.registers, clean.shared_bytes, clean.stack_bytes, clean.spill_load_bytes) == (80, 0, 0, 0)
    assert (spilled.blocks_per_multiprocessor, clean.blocks_per_multiprocessor) == (7, 6)


SOURCE = """
#include "linear_list_kernel.cuh"
namespace fastlayers {
template __global__ void linear_list_kernel<float>(
    Strided<const float>, const float*, const float*, Strided<float>, Shape, Tile);
template __global__ void linear_list_backward_kernel<float>(
    Strided<const float>, Strided<const float>, const float*, Strided<float>, float*, float*, Shape, Tile);
}
"""


@pytest.mark.slow
def test_the_accesses_are_those_we_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """16-byte asynchronous copies, 16-byte loads of weights, quads from shared memory, no atomics."""
    nvcc = find_nvcc(monkeypatch)
    (tmp_path / "kernels.cu").write_text(SOURCE)
    command = [nvcc, "-std=c++17", "-O3", "-ptx", "-arch=compute_90", f"-I{KERNELS}", "kernels.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    entries = (tmp_path / "kernels.ptx").read_text().split(".visible .entry ")[1:]
    assert len(entries) == 2
    for ptx in entries:
        assert re.search(r"cp\.async\.cg\.shared\.global +\[[^\]]+\], +\[[^\]]+\], +16", ptx)
        assert re.search(r"ld\.global(\.nc)?\.v4\.[fbu]32", ptx)
        assert re.search(r"ld\.shared\.v4\.[fbu]32", ptx)
        assert not re.search(r"\b(atom|red)\.", ptx)
        assert ".local " not in ptx
