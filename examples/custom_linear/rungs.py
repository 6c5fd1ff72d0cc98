"""The rungs by name, for the tests and the benchmark; importing it needs both C++ rungs built."""

from torch import nn

from . import linear_cpp, linear_op, linear_python

LAYERS: dict[str, type[nn.Module]] = {
    "python": linear_python.Layer,
    "cpp on ATen": linear_cpp.Layer,
    "cpp on loops": linear_cpp.LoopsLayer,
    "op on loops": linear_op.Layer,
}
