"""Build both C++ rungs beside their sources: python examples/custom_linear/setup.py build_ext --inplace."""

import os
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

# doc: setup
HERE = Path(__file__).resolve().parent
os.chdir(HERE)  # setuptools would read the project's own pyproject.toml
# Another header, flag or torch means another build.
depends = ["setup.py", "linear_loops.h", torch.__file__.replace("__init__", "version")]
setup(
    name="custom_linear",
    ext_modules=[
        CppExtension("_linear_cpp", ["linear_cpp.cpp"], depends=depends, extra_compile_args=["-O3", "-g0"]),
        CppExtension(
            "_linear_op",
            ["linear_op.cpp"],
            depends=depends,
            extra_compile_args=["-O3", "-g0", "-DTORCH_TARGET_VERSION=0x020a000000000000"],
            py_limited_api=True,  # links no libtorch_python; the file serves every Python
        ),
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
    options={"build": {"build_base": str(HERE.parents[1] / "build" / "custom_linear")}},
)
# doc: end
