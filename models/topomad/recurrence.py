"""All layers and time steps of a graph-LSTM in one function, with its backward written out.

What it computes is `GraphLSTM`'s plain loop over `GraphLSTMCell`, for the kinds whose graph layer is linear
("GCN", "WL1", "LIN"). It is faster for four reasons. Layer k runs its time step t at step t + k, so at each
step all layers are one LSTM with a block-triangular weight. Nothing is recorded per operator: a step takes 8
operators forward and 8 backward, for the derivatives of the gates are taken over all steps at once. The
weights' gradient is one product over all steps. And the windows come last, so that gates, features and
neighbours are all cut out of the buffers in whole rows: a sigmoid over three of four gates takes 50 us where
it takes 460 with the features last (50 nodes, 32 windows, 2 layers of 3 features, one thread).

Shapes: T time steps, S = T + L - 1 steps, N nodes, B windows, L layers, H features, 4 gates i, f, o, g.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .graph import Graph

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


class Tape(NamedTuple):
    """What the steps leave behind.

    gates (S, N, 4, L, H, B) after their activation; h and c (S + 1, N, L, H, B); tanh of the new c (S, N, L,
    H, B); neighbours, for each weight what it multiplied, (S or S + 1, N, L, H, B).
    """

    gates: Tensor
    h: Tensor
    c: Tensor
    tanh_c: Tensor
    neighbours: list[Tensor]


class GraphLSTMFunction(torch.autograd.Function):
    """Run a stack of graph-LSTM layers.

    Args:
        first: (T, N, 4, H, B), what the first layer's gates get from the input and its bias.
        bias: (4, L - 1, H), the other layers' biases, or None.
        h, c: (N, L, H, B), the states before.
        graph: whose `matrix` and `transposed` mix the nodes.
        mixes: for each weight, whether it takes the sum over neighbours of h (True) or h itself (False).
        weights: (4 * L * H, L * H) each, rows ordered gate, layer, feature; block-triangular, so that layer k
            reads layers k - 1 and k.

    Returns:
        The last layer's h over time (T, N, H, B), and the states after, (N, L, H, B) each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        bias: Tensor | None,
        h: Tensor,
        c: Tensor,
        graph: Graph,
        mixes: tuple[bool, ...],
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_steps, layers = first.shape[0], h.shape[1]
        steps, rest = num_steps + layers - 1, h.shape[1:]
        tape = Tape(
            first.new_empty(steps, len(h), 4, *rest),
            first.new_empty(steps + 1, *h.shape),
            first.new_empty(steps + 1, *h.shape),
            first.new_empty(steps, *h.shape),
            [],
        )
        for mix in mixes:
            tape.neighbours.append(first.new_empty(steps, *h.shape) if mix else tape.h)
        tape.gates[:num_steps, :, :, 0] = first
        tape.gates[num_steps:, :, :, 0] = 0
        if layers > 1:
            tape.gates[:, :, :, 1:] = 0 if bias is None else bias[..., None]
        tape.h[0], tape.c[0] = h, c
        for step in range(steps):
            _step(tape, step, graph, mixes, weights)
            for idle in _idle_layers(step, layers, num_steps):
                tape.h[step + 1, :, idle] = tape.h[step, :, idle]
                tape.c[step + 1, :, idle] = tape.c[step, :, idle]
        ctx.tape, ctx.graph, ctx.mixes, ctx.num_steps = tape, graph, mixes, num_steps
        ctx.has_bias = bias is not None
        ctx.save_for_backward(*weights)
        # Copies: what is returned may be changed in place, and must not keep the tape alive.
        return tape.h[layers:, :, -1].clone(), tape.h[-1].clone(), tape.c[-1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_top: Tensor, grad_h: Tensor, grad_c: Tensor) -> tuple[Tensor | None, ...]:
        tape, graph, mixes, weights = ctx.tape, ctx.graph, ctx.mixes, ctx.saved_tensors
        steps, num_nodes, layers, size, batch_size = tape.tanh_c.shape
        slopes, c_slope = _slopes(tape)
        grad_h, grad_c = grad_h.clone(), grad_c.clone()
        for step in reversed(range(steps)):
            if step >= layers - 1:
                grad_h[:, -1].add_(grad_top[step - layers + 1])
            idle = _idle_layers(step, layers, ctx.num_steps)
            kept = [(layer, grad_h[:, layer], grad_c[:, layer].clone()) for layer in idle]
            # From here on slopes[step], the derivative of each gate, becomes the gradient of each gate.
            grad = slopes[step]
            grad_c.addcmul_(grad_h, c_slope[step])
            grad[:, :2].mul_(grad_c[:, None])
            grad[:, 2].mul_(grad_h)
            grad[:, 3].mul_(grad_c)
            grad_c.mul_(tape.gates[step, :, 1])
            for layer, _, grad_c_before in kept:
                grad[:, :, layer] = 0
                grad_c[:, layer] = grad_c_before
            grad_h = _before_step(grad, graph, mixes, weights, grad_h.shape)
            for layer, grad_h_before, _ in kept:
                grad_h[:, layer].add_(grad_h_before)

        flat = slopes.view(steps * num_nodes, 4 * layers * size, batch_size)
        grads_weight = []
        for source in tape.neighbours:
            transposed = source[:steps].view(len(flat), layers * size, batch_size).transpose(1, 2)
            grads_weight.append(torch.bmm(flat, transposed).sum(0))
        grad_bias = slopes[:, :, :, 1:].sum((0, 1, 5)) if ctx.has_bias else None
        return slopes[: ctx.num_steps, :, :, 0], grad_bias, grad_h, grad_c, None, None, *grads_weight


def _idle_layers(step: int, num_layers: int, num_steps: int) -> list[int]:
    """The layers that keep their states at this step: layer k does time step `step - k`, if there is one."""
    return [k for k in range(num_layers) if not 0 <= step - k < num_steps]


def _step(tape: Tape, step: int, graph: Graph, mixes: tuple[bool, ...], weights: tuple[Tensor, ...]) -> None:
    gates = tape.gates[step]
    rows = gates.flatten(1, 3)
    for mix, weight, neighbours in zip(mixes, weights, tape.neighbours, strict=True):
        if mix:
            torch.mm(graph.matrix, tape.h[step].flatten(1), out=neighbours[step].flatten(1))
        rows.baddbmm_(weight.expand(len(rows), -1, -1), neighbours[step].flatten(1, 2))
    gates[:, :3].sigmoid_()
    gates[:, 3].tanh_()
    i, f, o, g = gates.unbind(1)
    new_c = torch.mul(f, tape.c[step], out=tape.c[step + 1]).addcmul_(i, g)
    tanh_c = torch.tanh(new_c, out=tape.tanh_c[step])
    torch.mul(o, tanh_c, out=tape.h[step + 1])


def _slopes(tape: Tape) -> tuple[Tensor, Tensor]:
    """Derivatives at all steps: of c by the gates i, f and g and of h by o, before their activations, (S, N,
    4, L, H, B); and of h by c (S, N, L, H, B)."""
    slopes = torch.empty_like(tape.gates)
    i, f, o, g = tape.gates.unbind(2)
    _sigmoid_backward(g, i, grad_input=slopes[:, :, 0])
    _sigmoid_backward(tape.c[:-1], f, grad_input=slopes[:, :, 1])
    _sigmoid_backward(tape.tanh_c, o, grad_input=slopes[:, :, 2])
    _tanh_backward(i, g, grad_input=slopes[:, :, 3])
    return slopes, torch.ops.aten.tanh_backward(o, tape.tanh_c)


def _before_step(
    grad_gates: Tensor,
    graph: Graph,
    mixes: tuple[bool, ...],
    weights: tuple[Tensor, ...],
    shape: torch.Size,
) -> Tensor:
    """Give the gradient of h before a step, (N, L, H, B), from that of its gates (N, 4, L, H, B)."""
    rows = grad_gates.flatten(1, 3)
    total = None
    for mix, weight in zip(mixes, weights, strict=True):
        part = torch.bmm(weight.t().expand(len(rows), -1, -1), rows)
        if mix:
            part = graph.transposed @ part.flatten(1)
        total = part.view(shape) if total is None else total.add_(part.view(shape))
    return total
