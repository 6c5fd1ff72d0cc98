"""What a linear map should give: the value in float64, and how much rounding its sum can suffer.

Every quantity of a list of linears (output, grad_x, grad_weight, grad_bias) is one batched product
``a @ b (+ c)``; `Expected` holds its value and the three sums that error bounds are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Expected(NamedTuple):
    """The float64 result of a sum of products, and the size of its terms (all of one shape, float64).

    `value`: the result. `low`: what `value` misses of the exact result, or None when float64 is exact enough
    (it is not when float64 itself is judged). `terms`: sum of the terms' absolute values. `squares`: sum of
    their squares. `inner`: how many terms. `stages`: how many sums stand behind each other, each rounded to
    the working dtype in between (1: none is).
    """

    value: Tensor
    terms: Tensor
    squares: Tensor
    inner: int
    low: Tensor | None = None
    stages: int = 1

    def map(self, function: Callable[[Tensor], Tensor]) -> Expected:
        low = None if self.low is None else function(self.low)
        return self._replace(
            value=function(self.value), terms=function(self.terms), squares=function(self.squares), low=low
        )


def expected_output(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Expected:
    """Output of N linears: x (*, N, I) or (*, 1, I), weight (N, O, I), bias (N, O) -> (*, N, O)."""
    lead = x.shape[:-2]
    rows = _rows_of(x, weight.shape[0])
    extra = None if bias is None else bias.unsqueeze(1)
    return _product(rows, weight.transpose(1, 2), extra, dtype).map(lambda t: _unrows(t, lead))


def expected_grad_x(grad_out: Tensor, weight: Tensor, shared: bool, dtype: torch.dtype) -> Expected:
    """Gradient of x: grad_out (*, N, O), weight (N, O, I) -> (*, N, I), or (*, 1, I) when x was shared."""
    lead, (n, o, i) = grad_out.shape[:-2], weight.shape
    if shared:  # one long sum over all N linears
        rows = grad_out.reshape(1, math.prod(lead), n * o)
        weight = weight.reshape(1, n * o, i)
    else:
        rows = _rows_of(grad_out, n)
    return _product(rows, _conj(weight), None, dtype).map(lambda t: _unrows(t, lead))


def expected_grad_weight(grad_out: Tensor, x: Tensor, dtype: torch.dtype) -> Expected:
    """Gradient of weight: grad_out (*, N, O), x (*, N, I) or (*, 1, I) -> (N, O, I)."""
    n = grad_out.shape[-2]
    return _product(_rows_of(grad_out, n).transpose(1, 2), _conj(_rows_of(x, n)), None, dtype)


def expected_grad_bias(grad_out: Tensor, dtype: torch.dtype) -> Expected:
    """Gradient of bias: grad_out (*, N, O) -> (N, O)."""
    rows = _rows_of(grad_out, grad_out.shape[-2])
    ones = torch.ones(rows.shape[0], 1, rows.shape[1], dtype=rows.dtype, device=rows.device)
    return _product(ones, rows, None, dtype).map(lambda t: t.squeeze(1))


def _rows_of(t: Tensor, n: int) -> Tensor:
    """(*, N or 1, F) -> (N, rows, F)."""
    t = t.expand(*t.shape[:-2], n, t.shape[-1]) if t.shape[-2] == 1 else t
    return t.movedim(-2, 0).reshape(n, math.prod(t.shape[:-2]), t.shape[-1])


def _unrows(t: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(N, rows, F) -> (*, N, F); a last dimension of 2 (complex) stays."""
    return t.reshape(t.shape[0], *lead, *t.shape[2:]).movedim(0, len(lead))


def _conj(t: Tensor) -> Tensor:
    return t.conj().resolve_conj() if t.is_complex() else t


def _product(a: Tensor, b: Tensor, c: Tensor | None, dtype: torch.dtype) -> Expected:
    """a (N, M, K) @ b (N, K, P) + c (N, 1, P); complex operands give (N, M, P, 2), as view_as_real does."""
    if a.is_complex() or b.is_complex():
        return _complex_product(a, b, c, dtype)
    a, b = a.detach().double(), b.detach().double()
    c = None if c is None else c.detach().double()
    low = None
    if dtype == torch.float64:
        value, low = _product_twice_float64(a, b, c)
    else:
        value = a @ b if c is None else torch.baddbmm(c, a, b)
    return Expected(
        value=value,
        terms=a.abs() @ b.abs() if c is None else torch.baddbmm(c.abs(), a.abs(), b.abs()),
        squares=a.square() @ b.square() if c is None else torch.baddbmm(c.square(), a.square(), b.square()),
        inner=a.shape[2] + (c is not None),
        low=low,
    )


def _complex_product(a: Tensor, b: Tensor, c: Tensor | None, dtype: torch.dtype) -> Expected:
    """The same as a product of larger real matrices: a complex sum of K terms is two real sums of 2K."""
    left = torch.cat([a.real, a.imag], dim=2)
    right = torch.cat([torch.cat([b.real, b.imag], dim=2), torch.cat([-b.imag, b.real], dim=2)], dim=1)
    extra = None if c is None else torch.cat([c.real, c.imag], dim=2)
    real_dtype = torch.float64 if dtype == torch.complex128 else torch.float32
    expected = _product(left, right, extra, real_dtype)
    return expected.map(lambda t: torch.stack(t.chunk(2, dim=-1), dim=-1))


def _product_twice_float64(a: Tensor, b: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """(value, low) of a @ b + c as if summed in twice the precision of float64.

    Dot2 of Ogita, Rump and Oishi, "Accurate sum and dot product", SIAM J. Sci. Comput. 26 (2005).
    """
    value = torch.zeros(a.shape[0], a.shape[1], b.shape[2], dtype=torch.float64, device=a.device)
    if c is not None:
        value = value + c
    low = torch.zeros_like(value)
    for k in range(a.shape[2]):
        x, y = a[:, :, k, None], b[:, None, k, :]
        product = x * y
        (x_high, x_low), (y_high, y_low) = _split(x), _split(y)
        product_low = x_low * y_low - (((product - x_high * y_high) - x_low * y_high) - x_high * y_low)
        total = value + product
        virtual = total - value
        low = low + ((value - (total - virtual)) + (product - virtual) + product_low)
        value = total
    finite = value.isfinite() & low.isfinite()
    return value, torch.where(finite, low, torch.zeros_like(low))


def _split(t: Tensor) -> tuple[Tensor, Tensor]:
    """Veltkamp's split of float64 in two halves of 26 bits, whose products are exact."""
    scaled = t * 134217729.0  # 2^27 + 1
    high = scaled - (scaled - t)
    return high, t - high
