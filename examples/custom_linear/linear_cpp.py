"""Rung 3: the same layer over the C++ functions of linear_cpp.cpp, on ATen and on our own loops."""

from typing import Any

import torch
from torch import Tensor

from . import _linear_cpp, linear_python
from .linear_python import check

hello = _linear_cpp.hello


# doc: aten
class Function(linear_python.Function):
    """Call the ATen version: C++, but every matmul still goes through the dispatcher."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        check(x, weight)
        return _linear_cpp.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(_linear_cpp.backward(grad_y, *ctx.saved_tensors))


class Layer(linear_python.Layer):
    """The layer on ATen's matmul."""

    function = Function


# doc: loops
class LoopsFunction(linear_python.Function):
    """Call our own loops: they read raw pointers, so every tensor is made contiguous here."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        check(x, weight)
        return _linear_cpp.forward_loops(x.contiguous(), weight.contiguous())

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor]:
        return LoopsBackward.apply(grad_y, *ctx.saved_tensors)


class LoopsBackward(torch.autograd.Function):
    """The backward as a Function of its own: autograd, which sees nothing of the loops, may come back."""

    @staticmethod
    def forward(grad_y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        # y.sum().backward() sends one number expanded to (B, O): strides (0, 0)
        return tuple(_linear_cpp.backward_loops(grad_y.contiguous(), x.contiguous(), weight.contiguous()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate grad_y W and grad_y^T x, given v and u for them: the same loops serve again."""
        grad_y, x, weight = ctx.saved_tensors
        grad_grad_y = LoopsFunction.apply(v, weight) + LoopsFunction.apply(x, u)
        return grad_grad_y, *LoopsBackward.apply(grad_y, v, u)


class LoopsLayer(linear_python.Layer):
    """The layer on our own loops."""

    function = LoopsFunction


# doc: end
