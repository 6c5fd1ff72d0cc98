"""Fast replacements for PyTorch's Linear layers, put into existing networks and proved equivalent."""

from . import ops
from ._linear_list import LinearList
from ._monarch_linear import MonarchLinear
from ._version import __version__
from .convert import (
    EXACT_RULES,
    Conversion,
    ConversionError,
    MonarchRule,
    Plan,
    convert_model,
    load_converted,
    plan,
)
from .equivalence import EquivalenceError, Report, verify

__all__ = [
    "EXACT_RULES",
    "Conversion",
    "ConversionError",
    "EquivalenceError",
    "LinearList",
    "MonarchLinear",
    "MonarchRule",
    "Plan",
    "Report",
    "__version__",
    "convert_model",
    "load_converted",
    "ops",
    "plan",
    "verify",
]
