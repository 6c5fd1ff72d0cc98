"""Pairs of models for the verifier's tests: a loop over small Linears, and the same as one stack."""

import torch
from torch import nn


class Stack(nn.Module):
    """N linears as one: (B, N, I) -> (B, N, O)."""

    def __init__(self, linears):
        super().__init__()
        self.weight = nn.Parameter(torch.stack([linear.weight.detach() for linear in linears]))
        self.bias = nn.Parameter(torch.stack([linear.bias.detach() for linear in linears]))

    def forward(self, x):
        y = torch.baddbmm(self.bias.unsqueeze(1), x.transpose(0, 1), self.weight.transpose(1, 2))
        return y.transpose(0, 1)


class Loop(nn.Module):
    """A Linear before the loop, so that gradients have to go through it."""

    def __init__(self, n=6, features=7, out_features=7):
        super().__init__()
        self.encoder = nn.Linear(features, features)
        self.heads = nn.ModuleList([nn.Linear(features, out_features) for _ in range(n)])

    def forward(self, x):
        x = torch.tanh(self.encoder(x))
        return torch.stack([head(x[:, i]) for i, head in enumerate(self.heads)], dim=1)


class Fused(nn.Module):
    """`Loop` with its heads in one layer; `make` may build a faulty one."""

    def __init__(self, loop, make=Stack):
        super().__init__()
        self.encoder = nn.Linear(loop.encoder.in_features, loop.encoder.out_features)
        self.encoder.load_state_dict(loop.encoder.state_dict())
        self.heads = make(loop.heads)

    def forward(self, x):
        return self.heads(torch.tanh(self.encoder(x)))


def stack_map(loop):
    """`param_map` of a `Fused` made from `loop`."""
    return {
        f"heads.{i}.{name}": (f"heads.{name}", i, tuple(parameter.shape))
        for i, head in enumerate(loop.heads)
        for name, parameter in head.named_parameters()
    }


def pair(make=Stack, batch=5, **sizes):
    """(original, converted, inputs, param_map)."""
    torch.manual_seed(0)
    loop = Loop(**sizes)
    x = torch.randn(batch, len(loop.heads), loop.encoder.in_features)
    return loop, Fused(loop, make), (x,), stack_map(loop)
