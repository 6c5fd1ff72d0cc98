"""Compile every CUDA source for every architecture; a warning or a spilled register is an error.

    python scripts/cuda_check.py [--csv FILE]

Needs nvcc (CUDA_HOME, PATH or /usr/local/cuda) and torch's headers, any build of torch; no GPU. Prints, for
each kernel and architecture, its registers, static shared memory (what a launch asks for besides is in
linear_list_plan.h: at most 48 KiB) and spills, and how many blocks of it a multiprocessor's registers hold.
Exit 1: the compiler refused or spilled; 2: there is no nvcc.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fastlayers import _build  # noqa: E402

ARCHITECTURES = (80, 90, 100)
THREADS = 128  # kThreads of linear_list_plan.h
REGISTERS = 65_536  # of a multiprocessor


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel on one architecture."""

    architecture: int
    kernel: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    blocks_per_multiprocessor: int


def find_nvcc() -> str:
    """The nvcc of the build, whatever CUDA torch has; BuildError where there is none."""
    os.environ["FORCE_CUDA"] = "1"
    return _build.find_nvcc(_build.Torch(Path(torch.__file__).parent, torch.__version__, torch.version.cuda))


def compile_source(nvcc: str, source: Path, architecture: int, folder: Path) -> str:
    """Compile one source to machine code; returns ptxas's report. BuildError holds the compiler's words."""
    target = f"arch=compute_{architecture},code=sm_{architecture}"
    command = [nvcc, "-std=c++17", "-O3", f"-gencode={target}", "-Xptxas=-v", "-Werror=all-warnings"]
    command += ["-Xcompiler=-fPIC,-Wall,-Wextra", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    command += [f"-I{ROOT / 'fastlayers' / 'csrc'}", "-isystem", str(Path(torch.__file__).parent / "include")]
    command += ["-c", str(source), "-o", str(folder / f"{source.stem}.{architecture}.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise _build.BuildError(f"{source.name} for sm_{architecture}:\n{done.stdout}{done.stderr}")
    return done.stderr


def read_report(report: str, architecture: int) -> list[Kernel]:
    """Read ptxas's report; the names are demangled by c++filt where it is there."""
    kernels = []
    for part in report.split("Compiling entry function ")[1:]:

        def number(pattern: str, part: str = part) -> int:
            match = re.search(pattern, part)
            return int(match[1]) if match else 0

        registers = number(r"Used (\d+) registers")
        per_warp = -(-registers * 32 // 256) * 256
        kernels.append(
            Kernel(
                architecture,
                short_name(part.split("'")[1]),
                registers,
                number(r"(\d+) bytes smem"),
                number(r"(\d+) bytes stack frame"),
                number(r"(\d+) bytes spill stores"),
                number(r"(\d+) bytes spill loads"),
                REGISTERS // per_warp // (THREADS // 32),
            )
        )
    return kernels


def short_name(mangled: str) -> str:
    """`linear_list_kernel<float>` of a mangled name."""
    try:
        name = subprocess.run(["c++filt", mangled], capture_output=True, text=True).stdout.strip()
    except OSError:
        return mangled
    match = re.search(r"(\w+<[\w ]+>)\(", name)
    return match[1] if match else name


def main() -> int:
    """Compile, print the table, judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    try:
        nvcc = find_nvcc()
    except _build.BuildError as reason:
        print(f"cuda-check: {reason}")
        return 2
    sources = sorted((ROOT / "fastlayers" / "csrc" / "cuda").glob("*.cu"))
    kernels: list[Kernel] = []
    with tempfile.TemporaryDirectory() as folder:
        for architecture in ARCHITECTURES:
            for source in sources:
                try:
                    report = compile_source(nvcc, source, architecture, Path(folder))
                except _build.BuildError as reason:
                    print(reason)
                    return 1
                kernels += read_report(report, architecture)
    names = [field.name for field in fields(Kernel)]
    print(f"{'sm':>4} {'kernel':50} {'registers':>9} {'shared':>7} {'stack':>6} {'spills':>7} {'blocks':>7}")
    for k in kernels:
        spills = k.spill_store_bytes + k.spill_load_bytes
        sizes = f"{k.registers:>9} {k.shared_bytes:>7} {k.stack_bytes:>6} {spills:>7}"
        print(f"{k.architecture:>4} {k.kernel:50} {sizes} {k.blocks_per_multiprocessor:>7}")
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(asdict(k) for k in kernels)
    spilled = [k for k in kernels if k.stack_bytes or k.spill_store_bytes or k.spill_load_bytes]
    print(f"{len(kernels)} kernels, no warnings, {len(spilled)} with spills")
    return 1 if spilled or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
