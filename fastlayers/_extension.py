"""Find and load the compiled libraries; say how they were built, or why they are missing.

FASTLAYERS_NO_EXT=1 loads nothing; FASTLAYERS_REQUIRE_EXT=1 and FASTLAYERS_REQUIRE_CUDA=1 make a missing CPU
or CUDA library an ImportError.
"""

import functools
import json
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).parent
_FILES = {"cpu": "_C_cpu.so", "cuda": "_C_cuda.so"}
_REQUIRE = {"cpu": "FASTLAYERS_REQUIRE_EXT", "cuda": "FASTLAYERS_REQUIRE_CUDA"}


@dataclass(frozen=True)
class Library:
    """One compiled library: whether it is loaded, why not, and how it was built."""

    name: str
    loaded: bool
    reason: str
    how: dict[str, Any]


def switched_off() -> bool:
    """Tell whether the user asked for the reference (FASTLAYERS_NO_EXT=1)."""
    return os.environ.get("FASTLAYERS_NO_EXT") == "1"


@functools.cache
def load() -> dict[str, Library]:
    """Load what there is, once; `fastlayers.ops` calls it after the ops are defined.

    Raises:
        ImportError: a library is missing that the environment requires.
    """
    libraries = {name: _load_one(name, _build_record().get(name, {})) for name in _FILES}
    for name, library in libraries.items():
        if os.environ.get(_REQUIRE[name]) == "1" and not library.loaded:
            raise ImportError(
                f"fastlayers: {_REQUIRE[name]}=1, but the {name} library is missing: {library.reason}"
            )
    return libraries


def _load_one(name: str, record: dict[str, Any]) -> Library:
    path = _PACKAGE / _FILES[name]
    how = {k: v for k, v in record.items() if k not in ("built", "reason")}
    if switched_off():
        return Library(name, False, "switched off by FASTLAYERS_NO_EXT=1", how)
    if name == "cuda" and torch.version.cuda is None:
        return Library(name, False, f"torch {torch.__version__} is not a CUDA build", how)
    if not path.is_file():
        return Library(name, False, record.get("reason", "it was never built"), how)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return Library(name, False, f"it does not load: {error}", how)
    return Library(name, True, "", how)


def _build_record() -> dict[str, Any]:
    path = _PACKAGE / "_build_record.json"
    return json.loads(path.read_text()) if path.is_file() else {}


@functools.cache
def warn_if_missing(device_type: str) -> None:
    """Warn once that an op runs as plain PyTorch for want of its library, and say what mends it."""
    library = load().get(device_type)
    if library is None or library.loaded or switched_off():
        return
    warnings.warn(
        f"fastlayers runs without its compiled {device_type} library, correct but slower:"
        f" {library.reason.splitlines()[0]}. To build it: {sys.executable} -m fastlayers._build"
        " (FASTLAYERS_NO_EXT=1 silences this)",
        stacklevel=3,
    )
