"""The judge in one line of a test: is this op's result as accurate as plain PyTorch's?"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ._expected import Expected, expected_grad_bias, expected_grad_weight, expected_grad_x, expected_output
from ._judge import Judgement, Verdict, judge, judge_tensor

LinearFunction = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


class LinearResult(NamedTuple):
    """Output of a list of linears and its gradients; what is None or empty is not judged."""

    output: Tensor | None = None
    grad_x: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None


def run_linear(
    function: LinearFunction, x: Tensor, weight: Tensor, bias: Tensor | None, grad_out: Tensor | None = None
) -> LinearResult:
    """Run `function(x, weight, bias)` on detached copies and, given `grad_out`, its backward."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    first, second, third = leaves
    assert first is not None and second is not None
    output = function(first, second, third)
    if grad_out is None:
        return LinearResult(output.detach())
    needed = [t for t in leaves if t is not None]
    return LinearResult(output.detach(), *torch.autograd.grad(output, needed, grad_out))


def plain_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad_out: Tensor | None = None
) -> LinearResult:
    """What a Python loop of `F.linear` gives: x (*, N or 1, I), weight (N, O, I), bias (N, O) -> (*, N, O).

    Each linear is differentiated by itself, so N = 10,000 takes no more memory than its results.
    """
    shared = x.shape[-2] == 1
    pieces = []
    for i in range(weight.shape[0]):
        linear_bias = None if bias is None else bias[i]
        grad = None if grad_out is None else grad_out[..., i, :]
        pieces.append(
            run_linear(
                torch.nn.functional.linear, x[..., 0 if shared else i, :], weight[i], linear_bias, grad
            )
        )
    output = torch.stack([p.output for p in pieces if p.output is not None], dim=-2)
    if grad_out is None:
        return LinearResult(output)
    grads_x = [p.grad_x for p in pieces if p.grad_x is not None]
    grad_x = torch.stack(grads_x, dim=-2)
    return LinearResult(
        output,
        grad_x.sum(dim=-2, keepdim=True) if shared else grad_x,
        torch.stack([p.grad_weight for p in pieces if p.grad_weight is not None]),
        None if bias is None else torch.stack([p.grad_bias for p in pieces if p.grad_bias is not None]),
    )


def judge_linear(
    result: LinearResult,
    original: LinearResult,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    grad_out: Tensor | None = None,
    *,
    name: str = "",
) -> list[Judgement]:
    """Judge the output and the gradients of a list of linears, each linear by itself.

    x (*, N, I) or (*, 1, I), weight (N, O, I), bias (N, O) or None, grad_out (*, N, O): the very values that
    both were computed from. One `Judgement` for each quantity that both have.
    """
    judgements = []

    def add(quantity: str, list_dim: int | None, expected: Callable[[torch.dtype], Expected]) -> None:
        new, old = getattr(result, quantity), getattr(original, quantity)
        if new is None or old is None or (new.numel() == 0 and old.numel() != 0):
            return
        label = f"{name}.{quantity}" if name else quantity
        judgements.append(judge(new, old, expected(new.dtype), list_dim=list_dim, name=label))

    shared = x.shape[-2] == 1 and weight.shape[0] != 1
    add("output", -2, lambda dtype: expected_output(x, weight, bias, dtype))
    if grad_out is not None:
        add("grad_x", None if shared else -2, lambda dtype: expected_grad_x(grad_out, weight, shared, dtype))
        add("grad_weight", 0, lambda dtype: expected_grad_weight(grad_out, x, dtype))
        add("grad_bias", 0, lambda dtype: expected_grad_bias(grad_out, dtype))
    return judgements


def assert_linear_as_accurate(
    result: LinearFunction | LinearResult | Tensor,
    original: LinearFunction | LinearResult | Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    grad_out: Tensor | None = None,
) -> list[Judgement]:
    """Raise AssertionError, naming the worst element, unless `result` is as accurate as `original`.

    `result` and `original`: a function of (x, weight, bias), which is run and, given `grad_out`,
    differentiated; or a `LinearResult` of tensors; or the output alone. `original=None` stands for a plain
    loop of `F.linear`. x (*, N, I) or (*, 1, I), weight (N, O, I), bias (N, O) or None, grad_out (*, N, O),
    in any floating dtype: the reference is computed from them in float64 (in twice that precision where
    float64 is judged).

        assert_linear_as_accurate(ops.linear_list, None, x, weight, bias, grad_out)
        assert_linear_as_accurate(LinearResult(grad_weight=g), None, x, weight, bias, grad_out)
    """

    def run(what: LinearFunction | LinearResult | Tensor | None) -> LinearResult:
        if what is None:
            return plain_linear(x, weight, bias, grad_out)
        if isinstance(what, LinearResult):
            return what
        if isinstance(what, Tensor):
            return LinearResult(what)
        return run_linear(what, x, weight, bias, grad_out)

    judgements = judge_linear(run(result), run(original), x, weight, bias, grad_out)
    if not judgements:
        raise ValueError(
            "assert_linear_as_accurate: result holds nothing to judge (pass grad_out for gradients)"
        )
    _require(judgements)
    return judgements


def assert_as_accurate(
    result: Tensor,
    original: Tensor,
    reference64: Tensor,
    *,
    terms: Tensor | None = None,
    squares: Tensor | None = None,
    inner: int = 1,
    stages: int = 1,
    envelope: Tensor | float = 0.0,
    list_dim: int | None = None,
    name: str = "",
) -> Judgement:
    """Raise AssertionError, naming the worst element, unless `result` is as accurate as `original`.

    `original`: what plain PyTorch gives in the same dtype; `reference64`: the same computed in float64 (in
    float64 itself, of two float64 results: any of them, the other's error is then the distance). Where the
    result is a sum of products, say so, for a hard bound on every element: `terms`, the sum of the absolute
    values of the products, `inner`, how many there are, `squares`, the sum of their squares (by default the
    largest that `terms` allows); `stages`, how many such sums follow each other with a rounding between.
    `envelope`: an error that counts as none. `list_dim`: a dimension each index of which is judged by itself.

        assert_as_accurate(layer(x), plain(x), plain.double()(x.double())) assert_as_accurate(y, x @ w,
        x.double() @ w.double(), terms=x.double().abs() @ w.double().abs(), inner=64)
    """
    if terms is None:
        judgement = judge_tensor(
            result, original, reference64, envelope=envelope, list_dim=list_dim, name=name
        )
    else:
        terms = terms.detach().double()
        squares = terms.square() if squares is None else squares.detach().double()
        expected = Expected(reference64.detach().double(), terms, squares, inner, stages=stages)
        judgement = judge(result, original, expected, list_dim=list_dim, name=name)
    _require([judgement])
    return judgement


def _require(judgements: list[Judgement]) -> None:
    bad = [j for j in judgements if j.verdict > Verdict.AS_ACCURATE]
    if bad:
        raise AssertionError("\n".join(str(j) for j in sorted(bad, key=lambda j: j.severity, reverse=True)))
