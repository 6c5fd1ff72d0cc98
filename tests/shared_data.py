"""Where tests find the data that is too large, or not ours, to be kept in the repository."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def shared_path(relative: str) -> Path:
    """Give the path of a shared file or folder, such as "data/topomad_checkpoints"; skip the test without it.

    The shared folder is FASTLAYERS_DATA, by default `shared` beside the repository.
    """
    root = Path(os.environ.get("FASTLAYERS_DATA") or ROOT.parent / "shared")
    path = root / relative
    if not path.exists():
        pytest.skip(
            f"{relative} not found in {root}: set FASTLAYERS_DATA to the folder that holds it",
            allow_module_level=True,
        )
    return path
