"""What can be done to N results at once: operations that keep their meaning with one more dimension in front.

Pointwise operations need no change, and broadcasting takes care of operands that all lanes share. Operations
that name dimensions count them from the end, or one further from the front. What is not listed here stays as
it is, once per lane.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._program import Node

_POINTWISE = {
    "add", "sub", "mul", "div", "true_divide", "neg", "abs", "exp", "exp2", "expm1", "log", "log1p",
    "log2", "log10", "sqrt", "rsqrt", "square", "sin", "cos", "tan", "tanh", "sigmoid", "relu", "relu6",
    "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "softplus", "softsign", "softshrink",
    "hardshrink", "tanhshrink", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "threshold", "erf",
    "sign", "floor", "ceil", "round", "trunc", "clamp", "clip", "clamp_min", "clamp_max", "reciprocal",
    "pow", "dropout", "sinh", "cosh", "asinh", "atan", "sinc", "where", "maximum", "minimum", "lerp",
    "float", "double", "half", "bfloat16", "clone", "detach", "contiguous", "nan_to_num", "addcmul",
    "addcdiv", "truediv", "pos",
}  # fmt: skip
_OPERATORS = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pos, operator.abs,
    operator.pow,
}  # fmt: skip
# Name -> (position of the dimension, how it is counted, default): one dimension argument that moves along.
_ONE_DIM = {
    "softmax": 1, "log_softmax": 1, "glu": 1, "sum": 1, "mean": 1, "unsqueeze": 1, "squeeze": 1, "cumsum": 1,
    "logsumexp": 1, "amax": 1, "amin": 1, "normalize": 2,
}  # fmt: skip
_TWO_DIMS = {"transpose", "swapaxes", "swapdims"}
_VIEWS = {"unsqueeze", "squeeze", "transpose", "swapaxes", "swapdims", "movedim", "permute", "expand_as"}
_ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Softplus,
    nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
    nn.LogSigmoid, nn.Threshold, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Dropout,
)  # fmt: skip


@dataclass(frozen=True)
class Lifted:
    """An operation's arguments on a stack; a pointwise one broadcasts operands of fewer dimensions."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pointwise: bool


def operation_name(node: Node) -> str:
    """The plain name of a function or method."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def is_view(node: Node) -> bool:
    """Tell whether an operation gives another view of the memory it reads."""
    return node.kind in ("call", "method") and operation_name(node) in _VIEWS


def is_pure(node: Node) -> bool:
    """Tell whether an operation can be left out when nobody reads its result."""
    return not (node.writes or node.random or node.kind == "module")


def lift(nodes: Sequence[Node]) -> Lifted | None:
    """The arguments of the first of N equal operations, for all of them on a stack; None if unknown."""
    node = nodes[0]
    if node.kind not in ("call", "method") or not node.args or not isinstance(node.args[0], Node):
        return None
    if not isinstance(node.args[0].value, Tensor) and node.target not in _OPERATORS:
        return None
    if "out" in node.kwargs or node.kwargs.get("inplace"):
        return None
    name, rank = operation_name(node), _rank(node.args[0])
    known = node.kind == "method" or node.target in _OPERATORS or _torch_function(node.target)
    if not known:
        return None
    if node.target is operator.getitem:
        return _lift_getitem(node)
    if name in _POINTWISE or node.target in _OPERATORS:
        return Lifted(node.args, node.kwargs, True)
    if name in _ONE_DIM and rank is not None:
        return _lift_dims(node, name, _ONE_DIM[name], rank)
    if name in _TWO_DIMS and len(node.args) == 3 and not node.kwargs:
        return Lifted((node.args[0], *(_shift(d) for d in node.args[1:])), {}, False)
    if name == "layer_norm" and all(a is None for a in (node.args[2:4] or (None,))):
        return Lifted(node.args, node.kwargs, False)
    return None


def _rank(value: Any) -> int | None:
    return value.value.ndim if isinstance(value, Node) and isinstance(value.value, Tensor) else None


def _torch_function(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return any(
        getattr(space, name, None) is function for space in (torch, F, torch.Tensor, operator, torch.special)
    )


def _shift(dim: int) -> int:
    return dim + 1 if dim >= 0 else dim


def _lift_dims(node: Node, name: str, position: int, rank: int) -> Lifted | None:
    args, kwargs = list(node.args), dict(node.kwargs)
    if name == "glu" and len(args) == 1 and "dim" not in kwargs:
        return Lifted(node.args, node.kwargs, False)
    if "dim" in kwargs:
        given: Any = kwargs["dim"]
    elif len(args) > position:
        given = args[position]
    else:
        return None
    if isinstance(given, (tuple, list)) and all(type(d) is int for d in given):
        moved: Any = tuple(_shift(d) for d in given)
    elif type(given) is int:
        moved = _shift(given)
    else:
        return None
    if "dim" in kwargs:
        kwargs["dim"] = moved
    else:
        args[position] = moved
    return Lifted(tuple(args), kwargs, False)


def _lift_getitem(node: Node) -> Lifted | None:
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if not isinstance(node.args[0].value, Tensor):
        return None
    for part in index:
        if not (part is None or part is Ellipsis or type(part) is int or type(part) is slice):
            return None
        if type(part) is slice and any(isinstance(x, Node) for x in (part.start, part.stop, part.step)):
            return None
    return Lifted((node.args[0], (slice(None), *index)), {}, False)


def lift_module(modules: Sequence[nn.Module]) -> bool:
    """Tell whether N modules are the same activation (or dropout), which one of them can do for all."""
    first = modules[0]
    if (
        not isinstance(first, _ACTIVATIONS)
        or type(first) not in _ACTIVATIONS
        or getattr(first, "inplace", False)
    ):
        return False
    return all(
        type(m) is type(first)
        and repr(m) == repr(first)
        and m.training == first.training
        and not any(value for name, value in vars(m).items() if name.endswith("_hooks") or name == "forward")
        for m in modules
    )
