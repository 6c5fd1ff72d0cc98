"""Judge rewritten linears one by one: what the new layer made of its own input, with the original's weights.

The new layer and the original Linears are each compared with float64 on the input that each was given, so
errors inherited from elsewhere do not count. How the two are called, and in which order, does not matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._expected import Expected, expected_grad_bias, expected_grad_weight, expected_grad_x, expected_output
from ._judge import Judgement, judge
from ._mapping import Site
from ._taps import Call, Taps

SAMPLE = 128  # of a longer list, this many of the original's Linears say how large its error is
BUDGET = 2**20  # elements of a quantity that are judged in float64; of more, a sample of the linears

Stacked = Callable[[list[str]], "Tensor | None"]  # parameter names of the original -> their tensors, stacked


def tapped_linears(sites: list[Site], seed: int) -> list[str]:
    """The original's Linears whose calls are kept: all, or a sample of a long list."""
    chosen = random.Random(seed)
    paths: list[str] = []
    for site in sites:
        every = range(len(site.linears))
        sample = every if len(every) <= SAMPLE else {0, len(every) - 1, *chosen.sample(every, SAMPLE - 2)}
        paths += [site.linears[k] for k in sample]
    return paths


def judge_site(
    site: Site,
    weights: Stacked,
    taps: tuple[Taps, Taps],
    gradients: tuple[Stacked, Stacked],
    seed: int = 0,
) -> list[Judgement] | str:
    """Judge output, grad_x, grad_weight and grad_bias of one site; or say why that cannot be done.

    `weights` are the original's; `taps` and `gradients` the original's and the converted model's, the latter
    both by the original's parameter names.
    """
    kept = [k for k, path in enumerate(site.linears) if path in taps[0].by_path]
    calls = _calls_of_linears([taps[0].by_path[site.linears[k]].calls for k in kept])
    new_calls = _calls_of_layer(site, taps[1].by_path[site.path].calls)
    for found in (calls, new_calls):
        if isinstance(found, str):
            return f"{site.path}: {found}; compared as whole tensors only"
    assert isinstance(calls, _Calls) and isinstance(new_calls, _Calls)
    elements = new_calls.x.shape[0] * (site.in_features + site.out_features)
    limit = max(1, BUDGET // max(1, elements))
    judged = list(range(len(site.linears)))
    if limit < len(judged):
        judged = sorted(random.Random(seed).sample(judged, limit))
    new_calls = new_calls.select([site.index[k] for k in judged])
    old = _Side.of(site, weights, kept, calls, gradients[0])
    new = _Side.of(site, weights, judged, new_calls, gradients[1])
    all_judged = len(judged) == new_calls.output.shape[1] == len(site.linears)
    same = kept == judged and new.given_the_same(old)
    results = []
    for quantity, list_dim in (("output", 1), ("grad_x", 1), ("grad_weight", 0), ("grad_bias", 0)):
        a, b = new.value(quantity), old.value(quantity)
        if a is None or b is None or (quantity == "grad_x" and new.shared and not all_judged):
            continue
        result = judge(
            a,
            b,
            new.expected(quantity),
            original_expected=None if same else old.expected(quantity),
            list_dim=None if quantity == "grad_x" and new.shared else list_dim,
            name=f"{site.path} {quantity}",
        )
        if result.linear is not None:
            result = replace(result, linear=judged[result.linear], of=site.linears[judged[result.linear]])
        results.append(result)
    return results


@dataclass(frozen=True)
class _Calls:
    """All calls of N linears in one run, as one: x (rows, N or 1, I), output and grad_out (rows, N, O)."""

    x: Tensor
    output: Tensor
    grad_x: Tensor | None
    grad_out: Tensor | None

    def select(self, index: list[int]) -> _Calls:
        if index == list(range(self.output.shape[1])):
            return self
        tensors = (self.x, self.output, self.grad_x, self.grad_out)
        return _Calls(*(t if t is None or t.shape[1] == 1 else t[:, index] for t in tensors))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Side:
    """What one of the models computed, and the original's weights it should have computed it with."""

    calls: _Calls
    weight: Tensor
    bias: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None

    @staticmethod
    def of(site: Site, weights: Stacked, chosen: list[int], calls: _Calls, gradients: Stacked) -> _Side:
        names = {leaf: [f"{site.linears[k]}.{leaf}" for k in chosen] for leaf in ("weight", "bias")}
        weight = weights(names["weight"])
        assert weight is not None
        if not site.bias:
            return _Side(calls, weight, None, gradients(names["weight"]), None)
        return _Side(
            calls, weight, weights(names["bias"]), gradients(names["weight"]), gradients(names["bias"])
        )

    @property
    def shared(self) -> bool:
        return self.calls.x.shape[1] == 1 and self.weight.shape[0] > 1

    def given_the_same(self, other: _Side) -> bool:
        """Did both sides start from the same numbers, forward and backward?"""
        pairs = ((self.calls.x, other.calls.x), (self.calls.grad_out, other.calls.grad_out))
        return all(
            a is b or (a is not None and b is not None and a.shape == b.shape and torch.equal(a, b))
            for a, b in pairs
        )

    def value(self, quantity: str) -> Tensor | None:
        if quantity != "output" and self.calls.grad_out is None:
            return None
        if quantity in ("grad_weight", "grad_bias"):
            return self.grad_weight if quantity == "grad_weight" else self.grad_bias
        return self.calls.output if quantity == "output" else self.calls.grad_x

    def expected(self, quantity: str) -> Expected:
        calls, dtype = self.calls, self.calls.output.dtype
        if quantity == "output":
            return expected_output(calls.x, self.weight, self.bias, dtype)
        assert calls.grad_out is not None
        if quantity == "grad_x":
            return expected_grad_x(calls.grad_out, self.weight, self.shared, dtype)
        if quantity == "grad_weight":
            return expected_grad_weight(calls.grad_out, calls.x, dtype)
        return expected_grad_bias(calls.grad_out, dtype)


def _calls_of_linears(calls: list[list[Call]]) -> _Calls | str:
    """The calls of several Linears, each (*, I) -> (*, O), as those of one layer."""
    if not all(calls):
        return "not every Linear of the original was called"
    if len({(sum(c.x.numel() for c in one), len(one)) for one in calls}) != 1:
        return "the original's Linears had inputs of different sizes"

    def rows(pick: Callable[[Call], Tensor | None]) -> Tensor | None:
        found = [[pick(call) for call in one] for one in calls]
        if any(t is None for one in found for t in one):
            return None
        joined = [torch.cat([t.reshape(-1, t.shape[-1]) for t in one if t is not None]) for one in found]
        return torch.stack(joined, dim=1)

    x, output = rows(lambda c: c.x), rows(lambda c: c.output)
    assert x is not None and output is not None
    return _Calls(x, output, rows(lambda c: c.grad_x), rows(lambda c: c.grad_out))


def _calls_of_layer(site: Site, calls: list[Call]) -> _Calls | str:
    """The calls of the layer that stands for them, whatever leading dimensions it was given."""
    if not calls:
        return "the new layer was not called as a module"
    parts = []
    for call in calls:
        flat = _is_flat(site, call)
        if flat is None:
            shapes = f"{tuple(call.x.shape)} -> {tuple(call.output.shape)}"
            return f"the new layer was called with {shapes}, no list of linears"
        i, o = site.in_features, site.out_features
        parts.append(
            [
                None if t is None else _as_list(t, features, flat)
                for t, features in ((call.x, i), (call.output, o), (call.grad_x, i), (call.grad_out, o))
            ]
        )
    if len({part[0].shape[1] for part in parts if part[0] is not None}) != 1:
        return "the new layer was called with shared and with separate inputs"
    x, output, grad_x, grad_out = (
        None if any(t is None for t in column) else torch.cat([t for t in column if t is not None])
        for column in zip(*parts, strict=True)
    )
    assert x is not None and output is not None
    return _Calls(x, output, grad_x, grad_out)


def _is_flat(site: Site, call: Call) -> bool | None:
    """Is the list dimension flattened into the features, (*, N·I) -> (*, N·O)? None: no list at all."""
    x, output, i, o = call.x, call.output, site.in_features, site.out_features
    least = max(site.index) + 1
    if x.dim() != output.dim() or not o:
        return None
    if site.stacked and x.dim() >= 2 and (x.shape[-1], output.shape[-1]) == (i, o):
        total = output.shape[-2]
        return False if x.shape[-2] in (1, total) and total >= least else None
    total, rest = divmod(output.shape[-1], o)
    return (
        True if rest == 0 and total >= least and x.shape[-1] == (total * i if site.stacked else i) else None
    )


def _as_list(t: Tensor, features: int, flat: bool) -> Tensor:
    t = t.unflatten(-1, (t.shape[-1] // features, features)) if flat else t
    return t.reshape(-1, t.shape[-2], features)
