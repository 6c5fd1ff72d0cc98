"""Rung 4: the same layer as a registered op; linear_op.cpp, where it is built, serves CPU tensors."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import linear_python
from .linear_python import check

# doc: schema
library = torch.library.Library("custom_linear", "FRAGMENT")
library.define("linear(Tensor x, Tensor weight) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.define(
    "linear_backward(Tensor grad_y, Tensor x, Tensor weight) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_linear = torch.ops.custom_linear.linear.default
_linear_backward = torch.ops.custom_linear.linear_backward.default


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute y (B, O) = x (B, I) weight (O, I)^T. Equivalent to ``x @ weight.T``.

    Raises:
        ValueError: shapes or devices that do not fit together.
        TypeError: dtypes that differ.
    """
    try:
        return _linear(x, weight)
    except RuntimeError:  # a kernel can raise nothing else: say it in our words where we can
        check(x, weight)
        raise


# doc: reference
def _reference(x: Tensor, weight: Tensor) -> Tensor:
    check(x, weight)
    return x @ weight.T


def _reference_backward(grad_y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad_y @ weight, grad_y.T @ x


library.impl("linear", _reference, "CompositeExplicitAutograd")
library.impl("linear_backward", _reference_backward, "CompositeExplicitAutograd")


# doc: fake
@torch.library.register_fake("custom_linear::linear", lib=library)
def _fake(x: Tensor, weight: Tensor) -> Tensor:
    check(x, weight)
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.register_fake("custom_linear::linear_backward", lib=library)
def _fake_backward(grad_y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


# doc: autograd
def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _grad(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    return _linear_backward(grad_y, *ctx.saved_tensors)


def _grad_of_backward(ctx: Any, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate grad_y W and grad_y^T x, given v and u for them: the same two ops serve again."""
    grad_y, x, weight = ctx.saved_tensors
    return _linear(v, weight) + _linear(x, u), *_linear_backward(grad_y, v, u)


torch.library.register_autograd("custom_linear::linear", _grad, setup_context=_save, lib=library)
torch.library.register_autograd(
    "custom_linear::linear_backward", _grad_of_backward, setup_context=_save, lib=library
)


# doc: load
def load() -> bool:
    """Load the compiled kernels, once they are built; without them the reference serves."""
    built = list(Path(__file__).parent.glob("_linear_op*.so"))
    for path in built:
        torch.ops.load_library(str(path))
    return bool(built)


compiled = load()


class Layer(linear_python.Layer):
    """The layer over the registered op."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


# doc: end
