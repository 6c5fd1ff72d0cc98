"""Fast replacements for PyTorch's Linear layers, put into existing networks and proved equivalent."""

from . import ops
from ._linear_list import LinearList
from ._monarch_linear import MonarchLinear
from ._version import __version__

__all__ = ["LinearList", "MonarchLinear", "__version__", "ops"]
