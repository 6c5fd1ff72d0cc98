"""Rung 2: forward and backward as a Python autograd.Function, and the layer that owns the weight."""

from typing import Any

import torch
from torch import Tensor, nn


# doc: function
class Function(torch.autograd.Function):
    """y (B, O) = x (B, I) weight (O, I)^T with a backward of our own."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        check(x, weight)
        return x @ weight.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)  # never ctx.x = x: that hides the tensor from autograd and leaks it

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        return grad_y @ weight if need_x else None, grad_y.T @ x if need_weight else None


def check(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError or TypeError, naming the argument, unless x (B, I) and weight (O, I) fit together."""
    if weight.dim() != 2:
        raise ValueError(f"linear: weight must be (O, I), got {tuple(weight.shape)}")
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear: x must be (B, I) = (*, {weight.shape[1]}) to match weight {tuple(weight.shape)},"
            f" got {tuple(x.shape)}"
        )
    if x.dtype != weight.dtype:
        raise TypeError(f"linear: weight must have x's dtype {x.dtype}, got {weight.dtype}")
    if x.device != weight.device:
        raise ValueError(f"linear: weight must be on x's device {x.device}, got {weight.device}")


# doc: layer
class Layer(nn.Module):
    """nn.Linear without a bias, for (B, I) input; its state_dict is that of nn.Linear(..., bias=False)."""

    function = Function

    def __init__(self, i_n_features_input: int, i_n_features_output: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(i_n_features_output, i_n_features_input))
        bound = i_n_features_input**-0.5 if i_n_features_input else 0.0
        nn.init.uniform_(self.weight, -bound, bound)  # as nn.Linear does

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)


# doc: end
