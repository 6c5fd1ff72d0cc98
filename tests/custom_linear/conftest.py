"""Build the C++ rungs of examples/custom_linear once, with the command that the document names."""

import fcntl
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def document() -> str:
    return (ROOT / "docs" / "custom_ops.md").read_text()


@pytest.fixture(scope="session")
def rungs(document: str) -> ModuleType:
    """`examples.custom_linear.rungs` over extensions that are built where they are not up to date."""
    if not shutil.which(shlex.split(os.environ.get("CXX") or "g++")[0]):
        pytest.skip("no C++ compiler to build examples/custom_linear with")
    (command,) = re.findall(r"^python (.* build_ext .*)$", document, re.MULTILINE)
    folder = ROOT / "build" / "custom_linear"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # another test process may be at it too
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = subprocess.run(
            [sys.executable, *shlex.split(command)], cwd=ROOT, capture_output=True, text=True
        )
        assert built.returncode == 0, built.stdout + built.stderr
        return importlib.import_module("examples.custom_linear.rungs")
