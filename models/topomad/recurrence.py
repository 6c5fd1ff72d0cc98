"""All layers and time steps of a graph-LSTM in one function, with its backward written out.

What it computes is `GraphLSTM`'s plain loop over `GraphLSTMCell`, for the kinds whose graph layer is linear
("GCN", "WL1", "LIN"). It is faster for three reasons: layer k runs its time step t at step t + k, so at each
step all layers are one LSTM with a block-triangular weight; nothing is recorded per operator, so a step takes
8 operators forward and 13 backward; and the weights' gradient is one product over all steps at the end.

Shapes: T time steps, S = T + L - 1 steps, N nodes, B windows, L layers, H hidden features, 4 gates i, f, o,
g.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .graph import Graph

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


class Tape(NamedTuple):
    """What the steps leave behind: gates (S, N, B, 4, L, H) after their activation, h and c (S + 1, N, B, L,
    H), tanh of the new c (S, N, B, L, H) and, for each recurrent term, the sums over neighbours of h."""

    gates: Tensor
    h: Tensor
    c: Tensor
    tanh_c: Tensor
    neighbours: list[Tensor]


def active_layers(step: int, num_layers: int, num_steps: int) -> slice:
    """The layers that have a time step to do at this step: layer k does time step `step - k`."""
    return slice(max(0, step - num_steps + 1), min(num_layers, step + 1))


class GraphLSTMFunction(torch.autograd.Function):
    """Run a stack of graph-LSTM layers.

    Args:
        first: (T, N, B, 4, H), what the first layer's gates get from the input and its bias.
        bias: (4, L - 1, H), the other layers' biases, or None.
        h, c: (N, B, L, H), the states before.
        graph: whose `matrix` and `transposed` mix the nodes.
        mixes: for each weight, whether it takes the sum over neighbours of h (True) or h itself (False).
        weights: (4 * L * H, L * H) each, rows ordered gate, layer, feature; block-triangular, so that layer k
            reads layers k - 1 and k.

    Returns:
        The last layer's h over time (T, N, B, H), and the states after, (N, B, L, H) each.
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
        num_steps, num_nodes, batch_size, _, size = first.shape
        layers = h.shape[2]
        steps = num_steps + layers - 1
        rows = (num_nodes, batch_size)
        tape = Tape(
            first.new_empty(steps, *rows, 4, layers, size),
            first.new_empty(steps + 1, *rows, layers, size),
            first.new_empty(steps + 1, *rows, layers, size),
            first.new_empty(steps, *rows, layers, size),
            [first.new_empty(steps, *rows, layers * size) for mix in mixes if mix],
        )
        tape.gates[:num_steps, ..., 0, :] = first
        tape.gates[num_steps:, ..., 0, :] = 0
        if layers > 1:
            tape.gates[..., 1:, :] = 0 if bias is None else bias
        tape.h[0], tape.c[0] = h, c
        for step in range(steps):
            active = active_layers(step, layers, num_steps)
            _step(tape, step, active, active == slice(0, layers), graph, mixes, weights)
        ctx.tape, ctx.graph, ctx.mixes, ctx.num_steps = tape, graph, mixes, num_steps
        ctx.has_bias = bias is not None
        ctx.save_for_backward(*weights)
        # Copies: what is returned may be changed in place, and must not keep the tape alive.
        return tape.h[layers:, ..., -1, :].clone(), tape.h[-1].clone(), tape.c[-1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_top: Tensor, grad_h: Tensor, grad_c: Tensor) -> tuple[Tensor | None, ...]:
        tape, graph, num_steps = ctx.tape, ctx.graph, ctx.num_steps
        weights = ctx.saved_tensors
        layers, size = tape.h.shape[-2:]
        grad_gates = torch.empty_like(tape.gates)
        grad_h, grad_c = grad_h.clone(), grad_c.clone()
        for step in reversed(range(num_steps + layers - 1)):
            active = active_layers(step, layers, num_steps)
            if active.stop == layers:
                grad_h[:, :, -1] += grad_top[step - layers + 1]
            whole = active == slice(0, layers)
            grad_h = _step_backward(
                tape, step, active, whole, graph, ctx.mixes, weights, grad_gates, grad_h, grad_c
            )
        flat = grad_gates.view(-1, 4 * layers * size)
        mixed = iter(tape.neighbours)
        grads_weight = [
            flat.t() @ (next(mixed) if mix else tape.h[:-1]).reshape(-1, layers * size) for mix in ctx.mixes
        ]
        grad_bias = grad_gates[..., 1:, :].sum((0, 1, 2)) if ctx.has_bias else None
        return grad_gates[:num_steps, ..., 0, :], grad_bias, grad_h, grad_c, None, None, *grads_weight


def _step(
    tape: Tape,
    step: int,
    active: slice,
    whole: bool,
    graph: Graph,
    mixes: tuple[bool, ...],
    weights: tuple[Tensor, ...],
) -> None:
    h, gates = tape.h[step], tape.gates[step]
    flat = gates.view(-1, gates.shape[-3] * gates.shape[-2] * gates.shape[-1])
    mixed = iter(tape.neighbours)
    for mix, weight in zip(mixes, weights, strict=True):
        source = h
        if mix:
            source = next(mixed)[step]
            torch.mm(graph.matrix, h.flatten(1), out=source.flatten(1))
        flat.addmm_(source.reshape(-1, weight.shape[1]), weight.t())
    gates[:, :, :3].sigmoid_()
    gates[:, :, 3].tanh_()
    new_h, new_c, tanh_c = tape.h[step + 1], tape.c[step + 1], tape.tanh_c[step]
    old_c = tape.c[step]
    if not whole:  # at the ends: layers that have not begun, or are done, keep their states
        new_h.copy_(h)
        new_c.copy_(old_c)
        gates, new_h, new_c, tanh_c, old_c = (t[..., active, :] for t in (gates, new_h, new_c, tanh_c, old_c))
    i, f, o, g = gates.unbind(2)
    torch.mul(f, old_c, out=new_c).addcmul_(i, g)
    torch.tanh(new_c, out=tanh_c)
    torch.mul(o, tanh_c, out=new_h)


def _step_backward(
    tape: Tape,
    step: int,
    active: slice,
    whole: bool,
    graph: Graph,
    mixes: tuple[bool, ...],
    weights: tuple[Tensor, ...],
    grad_gates: Tensor,
    grad_h: Tensor,
    grad_c: Tensor,
) -> Tensor:
    """Fill the step's grad_gates, update grad_c in place and give the gradient of h before the step."""
    gates, old_c, tanh_c, grad = tape.gates[step], tape.c[step], tape.tanh_c[step], grad_gates[step]
    into_h, into_c = grad_h, grad_c
    if not whole:
        grad.zero_()
        gates, old_c, tanh_c, grad, into_h, into_c = (
            t[..., active, :] for t in (gates, old_c, tanh_c, grad, into_h, into_c)
        )
    i, f, o, g = gates.unbind(2)
    grad_i, grad_f, grad_o, grad_g = grad.unbind(2)
    into_c += torch.ops.aten.tanh_backward(into_h * o, tanh_c)
    torch.mul(into_h, tanh_c, out=grad_o)
    torch.mul(into_c, g, out=grad_i)
    torch.mul(into_c, old_c, out=grad_f)
    torch.mul(into_c, i, out=grad_g)
    into_c *= f
    _sigmoid_backward(grad[:, :, :3], gates[:, :, :3], grad_input=grad[:, :, :3])
    _tanh_backward(grad[:, :, 3], gates[:, :, 3], grad_input=grad[:, :, 3])

    flat = grad_gates[step].view(-1, weights[0].shape[0])
    grad_old = None
    for mix, weight in zip(mixes, weights, strict=True):
        part = torch.mm(flat, weight).view(grad_h.shape)
        if mix:
            part = (graph.transposed @ part.flatten(1)).view(grad_h.shape)
        grad_old = part if grad_old is None else grad_old.add_(part)
    if not whole:
        grad_old[:, :, : active.start] += grad_h[:, :, : active.start]
        grad_old[:, :, active.stop :] += grad_h[:, :, active.stop :]
    return grad_old
