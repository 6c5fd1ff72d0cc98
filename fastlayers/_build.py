"""Build the compiled libraries with ninja, for `setup.py` and for ``python -m fastlayers._build``.

It imports neither torch nor the package, so that `setup.py` can load it inside pip's isolated build. There
torch is hidden: the interpreter the package is being installed for is asked where its torch lies. The
libraries use LibTorch's stable ABI (torch >= 2.10) and no Python headers; one build serves every Python.

Environment: FASTLAYERS_NO_EXT=1 builds nothing, FASTLAYERS_REQUIRE_EXT=1 turns a failure into an error,
FORCE_CUDA=1 builds the CUDA library whatever torch is found; CXX, CUDA_HOME, TORCH_CUDA_ARCH_LIST and
MAX_JOBS are respected.
"""

import functools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
RECORD = "_build_record.json"
LIBRARIES = {"cpu": "_C_cpu.so", "cuda": "_C_cuda.so"}
_MINIMUM = (2, 10)
_COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000")
# Units compiled for more than the baseline; which one runs is decided when the library loads.
_ISA = {
    "x86_64": {
        "avx2": "-mavx2 -mfma -mf16c",
        "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512",
    }
}
_ASK = (
    "import importlib.util as u; s = u.find_spec('torch');"
    "print(s.submodule_search_locations[0] if s and s.submodule_search_locations else '')"
)


class BuildError(Exception):
    """Why a library was not built, in words the user can act on."""


@dataclass(frozen=True)
class Torch:
    """The torch to build against, read off its files."""

    path: Path
    version: str
    cuda: str | None


def find_torch() -> Torch:
    """Find the torch of the environment the package is being installed into."""
    old = []
    for source, ask in _torch_candidates():
        found = ask()
        if found is None or not (found / "version.py").is_file():
            continue
        text = (found / "version.py").read_text()
        version = re.search(r"__version__ = '([^']+)'", text)
        cuda = re.search(r"^cuda[^=]*= '([^']+)'", text, re.M)
        number = version[1] if version else "0.0"
        if tuple(int(part) for part in number.split(".")[:2]) >= _MINIMUM:
            return Torch(found, number, cuda[1] if cuda else None)
        old.append(f"{number} ({source})")
    if old:
        raise BuildError(f"torch >= 2.10 is needed, found {', '.join(old)}")
    raise BuildError("no torch found in the environment; install torch first")


def _torch_candidates() -> Iterator[tuple[str, Callable[[], Path | None]]]:
    """Where torch may lie, nearest first: here, outside pip's isolation, with the parent processes."""
    yield "this process", _spec_path
    interpreters = [sys.executable]
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if os.environ.get(name):
            interpreters.append(str(Path(os.environ[name]) / "bin" / "python"))
    interpreters += _parent_interpreters()
    for interpreter in dict.fromkeys(interpreters):
        yield interpreter, functools.partial(_ask_interpreter, interpreter)


def _spec_path() -> Path | None:
    from importlib.util import find_spec

    spec = find_spec("torch")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _ask_interpreter(interpreter: str) -> Path | None:
    """Ask an interpreter for its own torch, without what an isolated build puts into the environment."""
    hidden = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME", "__PYVENV_LAUNCHER__")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    try:
        answer = subprocess.run(
            [interpreter, "-c", _ASK], env=environment, cwd="/", capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Path(answer.stdout.strip()) if answer.returncode == 0 and answer.stdout.strip() else None


def _parent_interpreters() -> list[str]:
    """The Pythons among this process's ancestors: pip's own, where the build runs in an environment apart."""
    found: list[str] = []
    pid = os.getppid()
    while pid > 1 and len(found) < 4:
        ps = shutil.which("ps")
        if ps is None:
            return found
        answer = subprocess.run(
            [ps, "-o", "ppid=,args=", "-p", str(pid)], capture_output=True, text=True
        ).stdout.split()
        if len(answer) < 2:
            return found
        if re.fullmatch(r"python[0-9.]*", Path(answer[1]).name) and shutil.which(answer[1]):
            found.append(answer[1])
        pid = int(answer[0])
    return found


def find_compiler() -> str:
    """The C++ compiler: $CXX, else the first of c++, g++ and clang++."""
    for name in [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]:
        if shutil.which(shlex.split(name)[0]):
            return name
    raise BuildError("no C++ compiler found (looked for $CXX, c++, g++, clang++); install g++ or clang")


def find_nvcc(torch: Torch) -> str:
    """The nvcc that fits torch's CUDA: a toolkit on the machine says nothing about the torch."""
    forced = os.environ.get("FORCE_CUDA") == "1"
    if torch.cuda is None and not forced:
        raise BuildError(f"torch {torch.version} is not a CUDA build (FORCE_CUDA=1 builds all the same)")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not shutil.which(nvcc):
        raise BuildError(
            f"no nvcc found (looked at $CUDA_HOME, PATH, /usr/local/cuda), torch has CUDA {torch.cuda}"
        )
    if torch.cuda is not None and not forced:
        release = nvcc_release(nvcc)
        if release[0] != int(torch.cuda.split(".")[0]):
            raise BuildError(f"nvcc is of CUDA {release[0]}.{release[1]}, torch of CUDA {torch.cuda}")
    return nvcc


def nvcc_release(nvcc: str) -> tuple[int, int]:
    """The CUDA release of an nvcc."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"{nvcc} --version names no release")
    return int(match[1]), int(match[2])


def architectures(release: tuple[int, int]) -> list[str]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST, by default compute capabilities 8.0, 9.0, 10.0 and PTX."""
    default = "8.0;9.0;10.0+PTX" if release >= (12, 8) else "8.0;9.0+PTX"
    flags = []
    for entry in re.split(r"[;, ]+", (os.environ.get("TORCH_CUDA_ARCH_LIST") or default).strip()):
        number = entry.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if entry.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def build(
    out: Path, work: Path, libraries: tuple[str, ...] = ("cpu", "cuda")
) -> dict[str, dict[str, object]]:
    """Build what can be built into ``out`` and record how, or why not, in ``out/_build_record.json``.

    Raises:
        BuildError: a library failed, or cannot be built, and FASTLAYERS_REQUIRE_EXT=1 asks for it. The CUDA
            library is asked for only where torch is a CUDA build, or by FORCE_CUDA=1.
    """
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, dict[str, object]] = {}
    for name in libraries:
        try:
            record[name] = {"built": True, **_build_one(name, out, work)}
        except BuildError as reason:
            record[name] = {"built": False, "reason": str(reason)}
            (out / LIBRARIES[name]).unlink(missing_ok=True)
    (out / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    failed = {name: r["reason"] for name, r in record.items() if not r["built"] and _required(name)}
    if failed:
        raise BuildError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    return record


def _required(name: str) -> bool:
    if os.environ.get("FASTLAYERS_REQUIRE_EXT") != "1":
        return False
    return (
        name == "cpu"
        or os.environ.get("FASTLAYERS_REQUIRE_CUDA") == "1"
        or os.environ.get("FORCE_CUDA") == "1"
    )


def _build_one(name: str, out: Path, work: Path) -> dict[str, object]:
    if sys.platform == "win32":
        raise BuildError("Windows is not supported; the reference runs instead")
    sources = [PACKAGE / "csrc" / "library.cpp"] if name == "cpu" else []
    sources += sorted((PACKAGE / "csrc" / name).glob("*.cpp" if name == "cpu" else "*.cu"))
    if not sources:
        raise BuildError(f"no sources in {PACKAGE / 'csrc' / name}")
    torch = find_torch()
    compiler = find_compiler()
    ninja = shutil.which("ninja")
    if ninja is None:
        raise BuildError("no ninja found; pip install ninja")
    includes = [f"-I{PACKAGE / 'csrc'}", f"-isystem {torch.path / 'include'}"]
    rules = [
        f"cxx = {compiler}",
        f"flags = {' '.join([*_COMMON, '-Wall -Wextra -ffp-contract=fast', *includes])}",
    ]
    libs = f"-L{torch.path / 'lib'} -ltorch_cpu"
    linker = "$cxx"
    how: dict[str, object] = {"torch": torch.version, "compiler": _version(compiler)}
    if name == "cuda":
        nvcc = find_nvcc(torch)
        gencode = architectures(nvcc_release(nvcc))
        how |= {"nvcc": ".".join(map(str, nvcc_release(nvcc))), "architectures": gencode}
        host = "-Xcompiler=-fPIC,-fvisibility=hidden"
        rules += [
            f"nvcc = {nvcc}",
            f"cuflags = -std=c++17 -O3 {host} {_COMMON[-1]} -DUSE_CUDA {' '.join(includes + gencode)}",
        ]
        linker = f"$nvcc -ccbin {compiler.split()[0]} -cudart shared"
        # Half of the C shim lies in libtorch_cuda, which a CPU build of torch lacks; libtorch brings either.
        libs = f"-Xlinker --no-as-needed -L{torch.path / 'lib'} -ltorch -ltorch_cpu"
        rules[1] += f" -DUSE_CUDA -isystem {Path(nvcc).resolve().parent.parent / 'include'}"
    units = {**_ISA.get(platform.machine(), {})} if name == "cpu" else {}
    how["units"] = ["baseline", *units]
    work = work / name
    work.mkdir(parents=True, exist_ok=True)
    (work / "build.ninja").write_text(_ninja_file(rules, sources, units, linker, libs, out / LIBRARIES[name]))
    jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
    result = subprocess.run([ninja, "-C", str(work), *jobs], capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"the compiler failed\n{(result.stdout + result.stderr)[-4000:]}")
    return how


def _version(compiler: str) -> str:
    text = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True).stdout
    return text.splitlines()[0] if text else compiler


def _ninja_file(
    rules: list[str], sources: list[Path], units: dict[str, str], linker: str, libs: str, target: Path
) -> str:
    lines = ["ninja_required_version = 1.5", *rules]
    lines += ["rule compile", "  command = $cxx -MMD -MF $out.d $flags $extra -c $in -o $out"]
    lines += ["  depfile = $out.d", "  deps = gcc"]
    if any(rule.startswith("nvcc") for rule in rules):
        lines += ["rule compile_cuda", "  command = $nvcc -MD -MF $out.d $cuflags -c $in -o $out"]
        lines += ["  depfile = $out.d", "  deps = gcc"]
    lines += ["rule link", f"  command = {linker} -shared $in -o $out {libs}"]
    objects = []
    for source in sources:
        isa = source.stem.rpartition("_")[2]
        if isa in {i for family in _ISA.values() for i in family} and isa not in units:
            continue
        rule = "compile_cuda" if source.suffix == ".cu" else "compile"
        objects.append(f"{source.stem}{source.suffix.replace('.', '_')}.o")
        lines += [f"build {objects[-1]}: {rule} {_escape(source)}", f"  extra = {units.get(isa, '')}"]
    lines += [f"build {_escape(target)}: link {' '.join(objects)}", f"default {_escape(target)}", ""]
    return "\n".join(lines)


def _escape(path: Path) -> str:
    return re.sub(r"([ :$])", r"$\1", str(path))


def main() -> int:
    """Build into the installed package and say how it went."""
    in_checkout = (PACKAGE.parent / "setup.py").is_file()
    with tempfile.TemporaryDirectory() as temporary:
        work = PACKAGE.parent / "build" / "ninja" if in_checkout else Path(temporary)
        record = build(PACKAGE, work)
    for name, how in record.items():
        print(f"{name}: built" if how["built"] else f"{name}: not built: {how['reason']}")
    return 0 if record["cpu"]["built"] else 1


if __name__ == "__main__":
    sys.exit(main())
