"""The build: finding torch, compilers and CUDA, and installing with pip in every situation (slow)."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from fastlayers import _build

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the source tree")


def test_finds_the_torch_of_this_environment() -> None:
    found = _build.find_torch()
    assert found == _build.Torch(Path(torch.__file__).parent, torch.__version__, torch.version.cuda)


def test_asks_the_interpreter_past_pip_s_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    assert _build._ask_interpreter(sys.executable) == Path(torch.__file__).parent
    assert _build._ask_interpreter("/nowhere/python") is None


def fake_torch(folder: Path, version: str, cuda: str | None) -> Path:
    (folder / "torch").mkdir()
    lines = [f"__version__ = '{version}'", f"cuda: Optional[str] = {cuda!r}"]
    (folder / "torch" / "version.py").write_text("\n".join(lines) + "\n")
    return folder / "torch"


def test_reads_version_and_cuda_off_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_torch(tmp_path, "2.11.0+cu128", "12.8")
    monkeypatch.setattr(_build, "_torch_candidates", lambda: [("here", lambda: path)])
    assert _build.find_torch() == _build.Torch(path, "2.11.0+cu128", "12.8")


def test_refuses_an_old_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_torch(tmp_path, "2.9.1", None)
    monkeypatch.setattr(
        _build, "_torch_candidates", lambda: [("here", lambda: path), ("there", lambda: None)]
    )
    with pytest.raises(_build.BuildError, match=r"^torch >= 2\.10 is needed, found 2\.9\.1 \(here\)$"):
        _build.find_torch()


def test_says_that_there_is_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "_torch_candidates", lambda: [("here", lambda: None)])
    with pytest.raises(_build.BuildError, match=r"^no torch found in the environment; install torch first$"):
        _build.find_torch()


def test_says_that_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(_build.BuildError, match=r"^no C\+\+ compiler found"):
        _build.find_compiler()
    monkeypatch.setenv("CXX", f"{sys.executable} -x c++")
    assert _build.find_compiler() == f"{sys.executable} -x c++"


def nvcc(folder: Path, release: str) -> Path:
    (folder / "bin").mkdir()
    script = folder / "bin" / "nvcc"
    script.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("cuda", "release", "forced", "reason"),
    [
        ("12.8", "12.4", False, None),
        ("12.8", "13.0", False, "nvcc is of CUDA 13.0, torch of CUDA 12.8"),
        ("12.8", "13.0", True, None),
        (None, "13.0", False, "torch 2.13.0 is not a CUDA build (FORCE_CUDA=1 builds all the same)"),
        (None, "13.0", True, None),
    ],
)
def test_torch_decides_about_cuda_not_the_toolkit(
    cuda: str | None,
    release: str,
    forced: bool,
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("FORCE_CUDA", str(int(forced)))
    script = nvcc(tmp_path, release)
    torch_build = _build.Torch(tmp_path, "2.13.0", cuda)
    if reason is None:
        assert _build.find_nvcc(torch_build) == str(script)
    else:
        with pytest.raises(_build.BuildError) as caught:
            _build.find_nvcc(torch_build)
        assert str(caught.value) == reason


def test_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    sm = "-gencode=arch=compute_{0},code=sm_{0}".format
    assert _build.architectures((12, 8)) == [
        *map(sm, (80, 90, 100)),
        "-gencode=arch=compute_100,code=compute_100",
    ]
    assert _build.architectures((12, 4))[-1] == "-gencode=arch=compute_90,code=compute_90"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 8.6;9.0+PTX")
    assert _build.architectures((13, 0)) == [
        *map(sm, (75, 86, 90)),
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_other_machines_compile_the_baseline_alone() -> None:
    sources = sorted((ROOT / "fastlayers" / "csrc" / "cpu").glob("*.cpp"))
    text = _build._ninja_file(["cxx = c++", "flags ="], sources, {}, "$cxx", "", Path("out.so"))
    assert "linear_list_baseline_cpp.o" in text and "avx" not in text


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that are installed, without what was built in place."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("*.so", "_build_record.json", "__pycache__")
    shutil.copytree(ROOT / "fastlayers", copy / "fastlayers", ignore=ignore)
    return copy


def install(sources: Path, target: Path, *arguments: str, torch_there: bool = True, **environment: str):
    """Install into a fresh environment by its own pip; what has torch sees this one's through a .pth file."""
    venv.create(target, with_pip=True)
    site = next((target / "lib").glob("python*/site-packages"))
    if torch_there:
        (site / "outer.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("VIRTUAL_ENV", "CXX") and not k.startswith("FASTLAYERS")
    }
    python = target / "bin" / "python"
    result = subprocess.run(
        [python, "-m", "pip", "install", "-v", "--no-deps", "--ignore-installed", *arguments, str(sources)],
        env=clean | environment,
        capture_output=True,
        text=True,
        cwd=target,
    )
    record = site / "fastlayers" / "_build_record.json"
    return result, python, json.loads(record.read_text()) if record.is_file() else None


USE = """
import torch, fastlayers
print(fastlayers._extension.load()["cpu"].loaded, fastlayers.LinearList(1, 1, 2)(torch.ones(2, 1)).shape[0])
"""


def use(python: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FASTLAYERS")}
    return subprocess.run(
        [python, *flags, "-c", USE], env=environment, cwd="/", capture_output=True, text=True
    )


@pytest.mark.slow
def test_plain_pip_install_compiles(sources: Path, tmp_path: Path) -> None:
    result, python, record = install(sources, tmp_path, FASTLAYERS_REQUIRE_EXT="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert record["cpu"]["built"] and record["cpu"]["torch"] == torch.__version__
    assert use(python, "-W", "error").stdout == "True 2\n"
    assert "py3-none" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "environment", "reason"),
    [
        ("no compiler", {"CXX": "/nowhere/c++"}, "no C++ compiler found"),
        ("compile error", {"CXX": "false"}, "the compiler failed"),
        ("switched off", {"FASTLAYERS_NO_EXT": "1"}, None),
    ],
)
def test_installs_pure_python_where_it_cannot_compile(
    case: str, environment: dict[str, str], reason: str | None, sources: Path, tmp_path: Path
) -> None:
    result, python, record = install(sources, tmp_path, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    if reason is None:
        assert record is None and "py3-none-any.whl" in result.stdout
    else:
        assert reason in record["cpu"]["reason"]
    used = use(python)
    assert used.stdout == "False 2\n"
    assert used.stderr.count("UserWarning: fastlayers runs without its compiled cpu library") == 1
    assert f"{python} -m fastlayers._build" in used.stderr
    mended = subprocess.run([python, "-m", "fastlayers._build"], capture_output=True, text=True, cwd="/")
    assert mended.stdout.startswith("cpu: built\n"), mended.stdout + mended.stderr
    assert use(python, "-W", "error").stdout == "True 2\n"


@pytest.mark.slow
def test_installs_without_torch(sources: Path, tmp_path: Path) -> None:
    """No torch in sight: neither the environment's nor, through the parents, this one's."""
    result, _, record = install(sources, tmp_path, torch_there=False, PATH="/usr/bin:/bin")
    assert result.returncode == 0, result.stdout + result.stderr
    assert not record["cpu"]["built"] or record["cpu"]["torch"] == torch.__version__


@pytest.mark.slow
def test_a_failure_is_an_error_where_asked(sources: Path, tmp_path: Path) -> None:
    result, _, record = install(sources, tmp_path, CXX="false", FASTLAYERS_REQUIRE_EXT="1")
    assert result.returncode != 0 and record is None
    assert "BuildError: cpu: the compiler failed" in result.stdout + result.stderr
