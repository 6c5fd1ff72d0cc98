"""Conversion: find the Linears that are called one by one, and put one fused layer in their place."""

from ._convert import EXACT_RULES, Conversion, convert_model, load_converted, plan
from ._measure import Measurement, Time, training_step
from ._monarch import MonarchRule
from ._types import ConversionError, ParamRef, Plan, Rewrite, Skip

__all__ = [
    "EXACT_RULES",
    "Conversion",
    "ConversionError",
    "Measurement",
    "MonarchRule",
    "ParamRef",
    "Plan",
    "Rewrite",
    "Skip",
    "Time",
    "convert_model",
    "load_converted",
    "plan",
    "training_step",
]
