"""Rung 1: the numbers derived by hand, and nn.Linear that gives the same.

python -m examples.custom_linear.on_paper
"""

import torch
from torch import nn

# doc: numbers
X = torch.tensor([[7.0, 8, 9], [10, 11, 12]])  # (B, I)
W = torch.tensor([[1.0, 2, 3], [4, 5, 6]])  # (O, I)
GRAD_Y = torch.tensor([[1.0, 2], [2, 3]])  # dL/dY, (B, O): in a network, what the layers behind send back

Y = torch.tensor([[50.0, 122], [68, 167]])
GRAD_X = torch.tensor([[9.0, 12, 15], [14, 19, 24]])
GRAD_W = torch.tensor([[27.0, 30, 33], [44, 49, 54]])


def run(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give Y, dL/dX and dL/dW of a layer whose weight is set to W."""
    layer.weight = nn.Parameter(W.clone())
    x = X.clone().requires_grad_()
    y = layer(x)
    grad_x, grad_weight = torch.autograd.grad(y, (x, layer.weight), GRAD_Y)
    return y.detach(), grad_x, grad_weight


# doc: end


if __name__ == "__main__":
    for name, value in zip(("Y", "dL/dX", "dL/dW"), run(nn.Linear(3, 2, bias=False)), strict=True):
        print(name, value.tolist())
