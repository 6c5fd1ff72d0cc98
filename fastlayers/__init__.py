"""Fast replacements for PyTorch's Linear layers, put into existing networks and proved equivalent."""

from ._version import __version__

__all__ = ["__version__"]
