"""The whole CUDA library, host code and kernels, on CPU tensors: it must pass the ops' own tests.

`cuda_emulation` compiles it for the CPU dispatch key; pytest runs once more in a process that loads it.
"""

import os
import subprocess
import sys

import pytest
from cuda_emulation.emulator import ROOT, build_library, find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler ($CXX, g++, clang++)")
PLUGIN = "tests.cuda_emulation.plugin"


def run_pytest(*arguments: str) -> str:
    build_library()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "FASTLAYERS_NO_EXT": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


REFUSED = """
import os, torch, fastlayers.ops
torch.ops.load_library(os.environ["EMULATED"])
x, weight = torch.zeros(4, 3, 2), torch.zeros(3, 5, 2)
wrong = [torch.zeros(size) for size in ((5, 3, 5), (4, 3, 4), (4, 2, 5))]
for grad_out in (*wrong, torch.zeros(4, 3, 5).double()):
    try:
        torch.ops.fastlayers.linear_list_backward(grad_out, x, weight, True, True, True)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""


def test_backward_refuses_what_does_not_fit() -> None:
    """Called past ops.py, the op must not read beyond its operands."""
    environment = {**os.environ, "FASTLAYERS_NO_EXT": "1", "EMULATED": str(build_library())}
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *shapes, dtype = done.stdout.strip().splitlines()
    assert len(shapes) == 3 and all("grad_out must be (*, N, O) with x's leading" in line for line in shapes)
    assert "grad_out must have x's dtype and device" in dtype


def test_the_ops_are_the_cuda_library() -> None:
    names = "accurate and (odd or seven or heads or leading or empty) or only_the_gradients"
    assert "passed" in run_pytest("tests/test_ops.py", "-k", names)


@pytest.mark.slow
def test_the_ops_pass_their_own_tests() -> None:
    assert "passed" in run_pytest(
        "tests/test_ops.py", "tests/test_ops_errors.py", "tests/test_ops_transforms.py"
    )
