"""Fast replacements for PyTorch's Linear layers, put into existing networks and proved equivalent."""

from . import ops
from ._linear_list import LinearList
from ._version import __version__

__all__ = ["LinearList", "__version__", "ops"]
