"""Build and run the SIMT machine: the CUDA kernels' own source, compiled by a C++ compiler, on the CPU.

Builds: "trace" sees every access to memory (races, unwritten results, sectors, banks), "address" runs
under AddressSanitizer and UndefinedBehaviorSanitizer; both are programs that read and write files. "library"
is the whole CUDA library, host code and kernels, for CPU tensors. Builds are kept in build/cuda_emulation,
named by a hash of what went into them.
"""

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KERNELS = ROOT / "fastlayers" / "csrc" / "cuda"
BUILDS = ROOT / "build" / "cuda_emulation"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_FLAGS = "-std=c++17 -O1 -g1 -Wall -Wextra -Werror -Wno-unknown-pragmas"
# Flags for the file that holds the kernels, for the machine's own files, and for the linker.
_PROGRAMS = {
    "trace": ("-DSIMT_TRACE -fsanitize=thread", "-DSIMT_TRACE", ""),
    "address": (
        "-fsanitize=address,undefined -fno-sanitize-recover=all",
        "-DSIMT_ASAN -fsanitize=address",
        "-fsanitize=address,undefined",
    ),
}


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, else g++ or clang++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    return next((name for name in names if shutil.which(shlex.split(name)[0])), None)


@dataclass(frozen=True)
class Run:
    """What a kernel gave: its results by name, and the machine's report."""

    results: dict[str, Tensor]
    problems: list[str]
    buffers: dict[str, dict[str, int]]
    shared: dict[str, int]


@dataclass(frozen=True)
class Emulator:
    """A compiled machine; `work` is a folder for its files."""

    program: Path
    work: Path

    def call(self, *arguments: str) -> str:
        """Run it; RuntimeError with its words where it fails (a sanitizer's report, for one)."""
        done = subprocess.run([str(self.program), *arguments], capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(arguments)}\n{done.stdout}{done.stderr}")
        return done.stdout

    def run(
        self,
        op: str,
        inputs: Mapping[str, Tensor | None],
        results: Mapping[str, Tensor],
        order: int = 0,
        planned_n: int | None = None,
    ) -> Run:
        """Run kernel `op` on (B, N, features) `inputs`; `results` give shape and layout of what it writes.

        `planned_n` cuts the call into blocks as if the list had that many linears.
        """
        weight, x = inputs["weight"], inputs["x"]
        assert weight is not None and x is not None
        sizes = dict(zip("BNOI", (x.shape[0], *weight.shape), strict=True))
        arguments = [f"{name}={size}" for name, size in {"order": order, **sizes}.items()]
        if planned_n is not None:
            arguments.append(f"planned_N={planned_n}")
        for name, t in {**inputs, **results}.items():
            if t is None:
                continue
            path = self.work / f"{name}.bin"
            path.write_bytes(_storage(t, name in results))
            strides = t.stride() if t.dim() == 3 else (0, 0, 0)
            arguments.append(f"{name}={path},{t.storage_offset()},{','.join(map(str, strides))}")
        report = json.loads(self.call(op, str(weight.dtype).removeprefix("torch."), *arguments))
        return Run({name: _read(self.work / f"{name}.bin", t) for name, t in results.items()}, **report)

    def plan(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, backward: bool, vectors: bool = True
    ) -> dict[str, Any]:
        """How the library cuts a call of (B, N, I, O) into blocks; `vectors`: the inputs are contiguous."""
        sizes = [f"{name}={size}" for name, size in zip("BNIO", shape, strict=True)]
        sizes += [f"item={dtype.itemsize}", f"accumulator={max(4, dtype.itemsize)}"]
        op = "plan_backward" if backward else "plan_forward"
        return json.loads(self.call(op, "", *sizes, f"vectors={int(vectors)}"))


def build_program(kind: str, kernels: Path = KERNELS, fault: str = "") -> Path:
    """Compile the machine around the kernel headers in `kernels`; RuntimeError where the compiler refuses.

    `fault` names a mutilated copy of the kernels, of which float32 alone is compiled.
    """
    kernel_flags, machine_flags, link_flags = _PROGRAMS[kind]
    machine = _build_machine(kind, machine_flags)
    only = "-DHARNESS_FLOAT32_ONLY" if fault else ""
    compile_ = f"{_compiler(kernels)} {kernel_flags} {only} -c {HERE / 'harness.cpp'} -o harness.o"
    link = f"{find_compiler()} {link_flags} {machine} harness.o -o machine"
    return _build(f"{kind}-{fault or 'harness'}".replace(" ", "-"), [compile_, link], kernels) / "machine"


def build_library() -> Path:
    """Compile the CUDA library for CPU tensors; RuntimeError where the compiler refuses."""
    torch_path = Path(torch.__file__).parent
    flags = "-fPIC -fvisibility=hidden"
    machine = _build_machine("library", flags)
    flags += (
        f" -DTORCH_TARGET_VERSION=0x020a000000000000 -I{KERNELS.parent} -isystem {torch_path / 'include'}"
    )
    sources = sorted(KERNELS.glob("*.cu"))
    compile_ = [f"{_compiler(KERNELS)} {flags} -x c++ -c {s} -o {s.stem}.o" for s in sources]
    objects = " ".join(f"{source.stem}.o" for source in sources)
    link = f"{find_compiler()} -shared {objects} {machine} -o emulated.so -L{torch_path / 'lib'} -ltorch_cpu"
    return _build(f"library-{torch.__version__}", [*compile_, link], KERNELS) / "emulated.so"


def _compiler(kernels: Path) -> str:
    return f"{find_compiler()} {_FLAGS} -I{HERE} -I{kernels}"


def _build_machine(kind: str, flags: str) -> str:
    lines = [f"{_compiler(KERNELS)} {flags} -c {HERE / f}.cpp -o {f}.o" for f in ("simt", "trace")]
    folder = _build(f"{kind}-machine", lines)
    return f"{folder / 'simt.o'} {folder / 'trace.o'}"


def _build(name: str, commands: list[str], kernels: Path | None = None) -> Path:
    """Run compiler commands in a folder named by their content, once, and remove what it was before."""
    content = sorted(HERE.glob("*.[ch]*"))
    content += [*sorted(kernels.glob("*.[ch]*")), KERNELS.parent / "checks.h"] if kernels else []
    digest = hashlib.sha256("\n".join(commands).replace(str(kernels), "").encode())
    for path in content:
        digest.update(path.read_bytes())
    folder = BUILDS / f"{name}-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (BUILDS / f"{name}.lock").open("w") as lock:  # two processes of one test run: the second waits
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            for old in BUILDS.glob(f"{name}-{'?' * 16}"):
                if old != folder:
                    shutil.rmtree(old)
            for command in commands:
                _command(command, folder)
            (folder / "done").touch()
    return folder


def _command(line: str, folder: Path) -> None:
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, cwd=folder)
    if done.returncode != 0:
        raise RuntimeError(f"{line}\n{done.stderr}")


def _storage(t: Tensor, result: bool) -> bytes:
    """The bytes of a tensor's storage up to its last element, so that one step further is out of bounds."""
    last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True)) if t.numel() else -1
    elements = t.storage_offset() + last + 1
    if result:
        return bytes(elements * t.element_size())
    flat = torch.as_strided(t, (elements,), (1,), 0)
    return flat.contiguous().view(torch.uint8).numpy().tobytes() if elements else b""


def _read(path: Path, like: Tensor) -> Tensor:
    content = bytearray(path.read_bytes())
    if not content:
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(content, dtype=like.dtype)
    return torch.as_strided(flat, like.shape, like.stride(), like.storage_offset())
