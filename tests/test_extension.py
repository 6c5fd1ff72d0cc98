"""The compiled library: loading, switching it off, its instruction sets, and threads."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from fastlayers import _extension, ops

needs_library = pytest.mark.skipif(not _extension.load()["cpu"].loaded, reason="no compiled CPU library")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FASTLAYERS_") or k == "FASTLAYERS_DATA"}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, timeout=120
    )


def test_switched_off_says_so_and_stays_silent() -> None:
    code = """
import torch, fastlayers
library = fastlayers._extension.load()["cpu"]
fastlayers.LinearList(3, 2, 4)(torch.ones(4, 3))
print(library.loaded, library.reason)
"""
    result = run(code, FASTLAYERS_NO_EXT="1")
    assert (result.stdout, result.stderr) == ("False switched off by FASTLAYERS_NO_EXT=1\n", "")


MISSING = """
import pathlib, warnings
from fastlayers import _extension  # loads what there is
import torch, fastlayers
_extension.load.cache_clear()
_extension._PACKAGE = pathlib.Path("/nowhere")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        _extension.warn_if_missing("cpu")
        _extension.warn_if_missing("meta")
print(len(caught), caught[0].message)
"""


def test_a_missing_library_warns_once_with_the_command() -> None:
    result = run(MISSING)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == (
        "1 fastlayers runs without its compiled cpu library, correct but slower: it was never built."
        f" To build it: {sys.executable} -m fastlayers._build (FASTLAYERS_NO_EXT=1 silences this)"
    )


def test_the_reference_path_warns() -> None:
    code = (
        MISSING.split("with warnings")[0]
        + "fastlayers.ops._kernel_linear_list(torch.ones(1, 1), torch.ones(1, 1, 1))"
    )
    assert "UserWarning: fastlayers runs without its compiled cpu library" in run(code).stderr


def test_a_missing_library_can_be_an_error() -> None:
    code = "import fastlayers"
    result = run(code, FASTLAYERS_NO_EXT="1", FASTLAYERS_REQUIRE_EXT="1")
    assert result.returncode == 1
    assert result.stderr.strip().endswith(
        "ImportError: fastlayers: FASTLAYERS_REQUIRE_EXT=1, but the cpu library is missing:"
        " switched off by FASTLAYERS_NO_EXT=1"
    )


@needs_library
def test_says_how_it_was_built() -> None:
    how = _extension.load()["cpu"].how
    assert set(how) == {"torch", "compiler", "units"} and how["units"][0] == "baseline"


@needs_library
def test_the_dispatcher_prefers_the_library() -> None:
    for name in ("linear_list", "linear_list_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastlayers::{name}", "CPU")


ACCURACY = """
import sys
sys.path.insert(0, "tests")
import torch
from test_ops import tensors, embed
from fastlayers import ops
from fastlayers.equivalence import assert_linear_as_accurate
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    for shape in ("ones", "odd", "seven", "tails", "long-sum", "many-rows"):
        assert_linear_as_accurate(ops.linear_list, None, *tensors(shape, dtype))
    x, weight, bias, grad_out = tensors("odd", dtype)
    f = lambda x, w, b: ops.linear_list(embed(x, "channel-last"), w, b, out_channel_last=True)
    assert_linear_as_accurate(f, None, x, weight, bias, grad_out)
print("ok")
"""


@needs_library
@pytest.mark.parametrize("capability", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_is_accurate(capability: str) -> None:
    result = run(ACCURACY, FASTLAYERS_CPU_CAPABILITY=capability)
    assert result.stdout == "ok\n", result.stderr


def digest() -> str:
    """A hash of results of every kernel, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    total = hashlib.sha256()
    shapes = [
        (64, 700, 7, 7),
        (1500, 3, 40, 70),
        (70, 90, 24, 33),
        (2100, 1, 9, 5),
        (33, 400, 16, 16),
        (3, 2, 300, 200),
    ]
    for batch, n, i, o in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            for x_list in (n, 1):
                x = torch.randn(batch, x_list, i, generator=generator).to(dtype)
                weight = torch.randn(n, o, i, generator=generator).to(dtype)
                grad_out = torch.randn(batch, n, o, generator=generator).to(dtype)
                y = ops.linear_list(x, weight, weight[:, :, 0].contiguous())
                last = ops.linear_list(x.mT.contiguous().mT, weight, out_channel_last=True)
                grads = torch.ops.fastlayers.linear_list_backward(grad_out, x, weight, True, True, True)
                for t in (y, last, *grads):
                    total.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@needs_library
def test_bitwise_the_same_for_any_number_of_threads_and_run_to_run() -> None:
    before = torch.get_num_threads()
    try:
        digests = []
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            digests.append(digest())
    finally:
        torch.set_num_threads(before)
    assert len(set(digests)) == 1
