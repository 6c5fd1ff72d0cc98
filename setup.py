"""Compile the libraries where possible, else install pure Python; fastlayers/_build.py does the work."""

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

spec = importlib.util.spec_from_file_location("_build", Path(__file__).parent / "fastlayers" / "_build.py")
_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_build)


class BuildLibraries(build_ext):
    """Run ninja for both libraries; a failure is recorded beside them, and fatal only where asked."""

    def run(self):
        here = Path(__file__).parent
        target, work = (
            (here, here / "build" / "ninja") if self.inplace else map(Path, (self.build_lib, self.build_temp))
        )
        for name, how in _build.build((target / "fastlayers").resolve(), work.resolve()).items():
            if not how["built"]:
                self.warn(f"fastlayers: the {name} library was not built: {how['reason']}")

    def get_output_mapping(self):
        return {}

    def get_outputs(self):
        folder = Path(self.build_lib) / "fastlayers"
        return [
            str(p) for name in (*_build.LIBRARIES.values(), _build.RECORD) if (p := folder / name).exists()
        ]


class AnyPythonWheel(bdist_wheel):
    """The libraries hold no Python code: one wheel serves every Python 3 of a platform."""

    def get_tag(self):
        python, abi, plat = super().get_tag()
        return (python, abi, plat) if self.root_is_pure else ("py3", "none", plat)


compiled = os.environ.get("FASTLAYERS_NO_EXT") != "1"
setup(
    ext_modules=[Extension("fastlayers._C_cpu", sources=[])] if compiled else [],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": AnyPythonWheel},
)
