"""Taps on the Linears of a model: what goes in, what comes out, and their gradients, without changing either.

Autograd differentiates `x[:, i]` by a zero tensor of x's size for each i: for 10,000 slices 10 GiB and half a
minute. A tap therefore takes the slice out of its base itself, and adds all the slices' gradients into one
buffer. The numbers are the same; so is the graph's order, also inside a loop over time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Call:
    """One call of a module: its input and output, and the gradients that reached them (detached)."""

    x: Tensor
    output: Tensor
    grad_x: Tensor | None = None
    grad_out: Tensor | None = None


@dataclass
class Tap:
    """Collects the calls of one module."""

    calls: list[Call] = field(default_factory=list)


class Taps:
    """Context manager: taps on some modules of a model while it runs, and cheap slices for some Linears."""

    def __init__(self, model: nn.Module, kept: Iterable[str], cheap_slices: Iterable[str] = ()) -> None:
        """`kept`: paths of modules whose calls are kept; `cheap_slices`: of plain Linears."""
        modules = dict(model.named_modules(remove_duplicate=False))
        self.by_path = {path: Tap() for path in kept}
        self._kept = {path: modules[path] for path in self.by_path}
        self._cheap = {path: modules[path] for path in cheap_slices}
        self.called: set[str] = set()
        self._slices = _Slices()
        self._handles: list[Any] = []

    def __enter__(self) -> Taps:
        self.called, self._slices = set(), _Slices()
        for path, tap in self.by_path.items():
            tap.calls.clear()
            module = self._kept[path]
            self._handles.append(module.register_forward_pre_hook(self._before(path, tap)))
            self._handles.append(module.register_forward_hook(_after(tap)))
        for path, module in self._cheap.items():
            if path not in self.by_path:  # hooks cost twice what this does
                module.__dict__["forward"] = self._forward(path, module._parameters)
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._cheap.values():
            module.__dict__.pop("forward", None)
        self._slices = _Slices()

    def _forward(self, path: str, parameters: dict[str, Any]) -> Callable[[Tensor], Tensor]:
        """`nn.Linear.forward`, of a slice that is taken out of its base."""
        called, slices = self.called, self._slices

        def forward(input: Tensor) -> Tensor:
            called.add(path)
            return nn.functional.linear(slices.take(input), parameters["weight"], parameters["bias"])

        return forward

    def _before(self, path: str, tap: Tap) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
        cheap = path in self._cheap

        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            self.called.add(path)
            if not args or not isinstance(args[0], Tensor):
                return None
            x = args[0]
            if x.requires_grad and torch.is_grad_enabled():
                # An alias, so that the gradient of this call is told apart from x's other uses.
                x = self._slices.take(x) if cheap else x
                x = x.view_as(x)
            tap.calls.append(Call(x, x))
            return (x, *args[1:])

        return hook


def _after(tap: Tap) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = tap.calls[-1] if tap.calls else None
        if call is None or not isinstance(output, Tensor):
            return
        if call.x.requires_grad:
            call.x.register_hook(lambda grad: setattr(call, "grad_x", grad.detach()))
        if output.requires_grad:
            output.register_hook(lambda grad: setattr(call, "grad_out", grad.detach()))
        # Later code may write into the output (relu_), or free the input for reuse.
        call.x, call.output = call.x.detach().clone(), output.detach().clone()

    return hook


class _Slices:
    """Replaces views of one base by slices with a cheap gradient."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int, int, int | None], tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._anchors: dict[tuple[int, int], tuple[Tensor, Tensor, list[Tensor]]] = {}

    def take(self, x: Tensor) -> Tensor:
        """The same slice, or x itself where it is none."""
        base = x._base
        if base is None or not base.requires_grad or not torch.is_grad_enabled():
            return x
        place = _place(x, base)
        if place is not None:  # all slices at once: one node of the graph, one gradient
            dim, length, index = place
            key = (id(base), base._version, dim, length)
            if key not in self._parts:
                parts = base.unbind(dim) if length is None else base.split(length, dim)
                self._parts[key] = base, parts
            return self._parts[key][1][index]
        if not _is_dense(base) or _overlaps(x):
            return x
        base_key = (id(base), base._version)
        if base_key not in self._anchors:
            grads: list[Tensor] = []
            self._anchors[base_key] = base, _Anchor.apply(base, grads), grads
        _, anchor, grads = self._anchors[base_key]
        return _Slice.apply(anchor, x.detach(), base.detach(), grads)


def _place(x: Tensor, base: Tensor) -> tuple[int, int | None, int] | None:
    """(dim, length, index): x is `base.split(length, dim)[index]`, or (None) `base.unbind(dim)[index]`."""
    shape, strides = tuple(base.shape), base.stride()
    offset = int(x.storage_offset()) - int(base.storage_offset())
    if x.dim() == base.dim() - 1:
        for dim in range(base.dim()):
            if (
                tuple(x.shape) == shape[:dim] + shape[dim + 1 :]
                and x.stride() == strides[:dim] + strides[dim + 1 :]
            ):
                index, rest = divmod(offset, strides[dim]) if strides[dim] else (0, 1)
                if rest == 0 and 0 <= index < shape[dim]:
                    return dim, None, index
    elif x.dim() == base.dim() and x.stride() == strides:
        cut = [dim for dim in range(x.dim()) if x.shape[dim] != shape[dim]]
        if len(cut) == 1 and x.shape[cut[0]] > 0 and strides[cut[0]]:
            dim, length = cut[0], x.shape[cut[0]]
            start, rest = divmod(offset, strides[dim])
            if rest == 0 and start % length == 0 and start + length <= shape[dim]:
                return dim, length, start // length
    return None


class _Anchor(torch.autograd.Function):
    """Stands for the base: its slices hang on this scalar, so its backward comes after all of theirs.

    `grads` is where their gradients meet: nothing, or one tensor laid out as the base.
    """

    @staticmethod
    def forward(ctx: Any, base: Tensor, grads: list[Tensor]) -> Tensor:
        ctx.grads = grads
        return base.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *unused: Tensor) -> Any:
        return ctx.grads.pop(), None


class _Slice(torch.autograd.Function):
    """The slice itself; its gradient is added where it lies in its base."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, base: Tensor, grads: list[Tensor]) -> Tensor:
        ctx.base, ctx.grads = base, grads
        ctx.where = x.shape, x.stride(), x.storage_offset() - base.storage_offset()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if not ctx.grads:
            ctx.grads.append(torch.zeros_like(ctx.base))
        ctx.grads[0].as_strided(*ctx.where).add_(grads[0])
        return grads[0].new_zeros(()), None, None, None


def _is_dense(base: Tensor) -> bool:
    return base.numel() == 0 or torch.empty_like(base, device="meta").stride() == base.stride()


def _overlaps(x: Tensor) -> bool:
    """May two elements of x share memory (expanded, unfolded)?"""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * size
    return False
