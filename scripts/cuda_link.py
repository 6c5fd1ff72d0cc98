"""Build the CUDA library against this torch and load it into a CUDA build of torch; no GPU is needed.

    python scripts/cuda_link.py [--torch 2.14.1]

Makes build/cuda-link/venv once (several GB), builds `_C_cuda.so` with the headers of the torch that runs this
script, and asserts in the other torch that both ops have their CUDA kernels. Exit 1 where they have not.
"""

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from fastlayers import _build  # noqa: E402

LOAD = """
import sys, torch, fastlayers.ops
torch.ops.load_library(sys.argv[1])
has = torch._C._dispatch_has_kernel_for_dispatch_key
missing = [op for op in ("linear_list", "linear_list_backward") if not has(f"fastlayers::{op}", "CUDA")]
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, GPU {torch.cuda.is_available()}:",
      f"no CUDA kernel for {missing}" if missing else "both ops have their CUDA kernels")
sys.exit(bool(missing) or torch.version.cuda is None)
"""


def main() -> int:
    """Build, load, say how it went."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch", default="2.14.1", help="the CUDA build to load into (default %(default)s)")
    arguments = parser.parse_args()
    work = ROOT / "build" / "cuda-link"
    python = work / f"venv-{arguments.torch}" / "bin" / "python"
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "-q", f"torch=={arguments.torch}", "numpy", "safetensors"]
    subprocess.run(pip, check=True)
    os.environ["FORCE_CUDA"] = "1"
    os.environ["FASTLAYERS_REQUIRE_EXT"] = "1"
    _build.build(work, work / "ninja", ("cuda",))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FASTLAYERS_NO_EXT": "1"}
    del environment["FASTLAYERS_REQUIRE_EXT"]  # this library is loaded by its path
    library = str(work / _build.LIBRARIES["cuda"])
    return subprocess.run([str(python), "-c", LOAD, library], env=environment, cwd=work).returncode


if __name__ == "__main__":
    sys.exit(main())
