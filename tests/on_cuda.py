"""A pytest plugin (`-p tests.on_cuda`) under which tests that name no device run on the GPU."""

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        pytest.exit("tests.on_cuda: torch finds no GPU", returncode=3)
    torch.set_default_device("cuda")
