"""A pytest plugin (`-p tests.cuda_emulation.plugin`) under which ops run the CUDA library on CPU tensors.

Set FASTLAYERS_NO_EXT=1, so that no CPU kernel stands in its way.
"""

import torch

from fastlayers import _extension
from tests.cuda_emulation.emulator import build_library

assert _extension.switched_off(), "set FASTLAYERS_NO_EXT=1"
torch.ops.load_library(str(build_library()))
