"""A private copy of a model: put in a mode and a precision, run, and put back as it was."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ._tree import is_differentiable, tensors, wide

_OF_A_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_PLAIN_LINEAR = frozenset(nn.Linear(1, 1).__dict__)


class Subject:
    """A copy of `model` whose state (buffers, attributes, train flags) is restored after every run."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy_model(model)
        self.parameters = list(self.model.named_parameters(remove_duplicate=False))
        self._modules = list(self.model.named_modules(remove_duplicate=False))
        self._dtypes = {id(t): t.dtype for t in self._owned()}
        self._state = _State(self.model)
        self.widened = False
        self.cheap_slices: list[
            str
        ] = []  # Linears that read slices of one tensor, so many that autograd is slow

    def buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now, by name, copied."""
        return {
            f"{path}.{name}".lstrip("."): buffer.detach().clone()
            for path, module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def _owned(self) -> Iterator[Tensor]:
        seen: set[int] = set()
        buffers = (b for _, m in self._modules for b in m._buffers.values() if b is not None)
        for tensor in (*(p for _, p in self.parameters), *buffers):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor

    def set_mode(self, mode: str) -> None:
        """`eval`; or `train`, which leaves the flags of a model that is in train mode as they are."""
        self.restore()
        if mode == "eval":
            self.model.eval()
        elif not self.model.training:
            self.model.train()

    def widen(self, unregistered: bool = False) -> None:
        """To float64 (complex128); with `unregistered` also tensors and modules that are mere attributes.

        The former is undone by `narrow`, the latter is not.
        """
        self.restore()
        for tensor in self._owned():
            tensor.data = tensor.data.to(wide(tensor.dtype))
        if unregistered:
            for _, module in self._modules:
                for _, value in _attributes(module):
                    _widen_attribute(value)
        self._state, self.widened = _State(self.model), True

    def narrow(self) -> None:
        """Back to the dtypes of the model itself: exact, since widening was."""
        self.restore()
        for tensor in self._owned():
            tensor.data = tensor.data.to(self._dtypes[id(tensor)])
        self._state, self.widened = _State(self.model), False

    def restore(self) -> None:
        self._state.restore()
        for _, parameter in self.parameters:
            parameter.grad = None


class _State:
    """Train flags, buffers and plain attributes of every module, to go back to."""

    def __init__(self, model: nn.Module) -> None:
        self._flags = [(module, module.training) for module in model.modules()]
        held = list(model.buffers())
        self._entries: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in model.modules():
            if type(module) is not nn.Linear:
                self._entries.append((module._buffers, dict(module._buffers)))
                attributes = _attributes(module)
                self._entries.append((module.__dict__, {k: _kept(v) for k, v in attributes}))
                held += [t for _, t in tensors([v for _, v in attributes])]
        self._tensors = [(t, t.detach().clone()) for t in held]

    def restore(self) -> None:
        for module, training in self._flags:
            module.training = training
        with torch.no_grad():
            for tensor, value in self._tensors:  # always: BatchNorm moves its statistics without a trace
                tensor.copy_(value)
        for target, entries in self._entries:
            gone = [k for k in target if k not in entries and k not in _OF_A_MODULE and k != "training"]
            for name in gone:
                del target[name]
            target.update({k: _kept(v) for k, v in entries.items()})


def _kept(value: Any) -> Any:
    """A value that a run may change in place: containers are copied, one level deep."""
    return type(value)(value) if type(value) in (list, dict, set, OrderedDict) else value


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    return [(k, v) for k, v in module.__dict__.items() if k not in _OF_A_MODULE and k != "training"]


def _widen_attribute(value: Any) -> None:
    if isinstance(value, nn.Module):
        value.double()
        return
    held = list(value) if isinstance(value, (list, tuple)) else []
    held = list(value.values()) if isinstance(value, dict) else held
    for item in held:
        if isinstance(item, nn.Module):
            item.double()
    for _, tensor in tensors(value):
        if is_differentiable(tensor):
            tensor.data = tensor.data.to(wide(tensor.dtype))


def copy_model(model: nn.Module) -> nn.Module:
    """`copy.deepcopy(model)`, also with results of earlier runs among its attributes; quick for many Linears.

    Raises TypeError that names the first module that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        if _is_plain_linear(module):
            memo[id(module)] = _copy_linear(module, memo)
            continue
        for _, tensor in tensors([v for _, v in _attributes(module)]):
            if tensor.grad_fn is not None:  # deepcopy refuses it; without its history it is just a value
                memo[id(tensor)] = tensor.detach().clone()
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise TypeError(f"verify: the model cannot be copied ({_culprit(model)}): {error}") from error


def _is_plain_linear(module: nn.Module) -> bool:
    hooks = any(v for k, v in module.__dict__.items() if k.endswith("_hooks"))
    return type(module) is nn.Linear and module.__dict__.keys() == _PLAIN_LINEAR and not hooks


def _copy_linear(linear: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """What deepcopy does to a plain Linear, 10 times as fast: 10,000 of them take 2 s there."""
    new = nn.Linear.__new__(nn.Linear)
    for name, value in linear.__dict__.items():
        new.__dict__[name] = type(value)(value) if isinstance(value, (dict, set)) else value
    for name, parameter in linear._parameters.items():
        new._parameters[name] = _copy_parameter(parameter, memo)
    return new


def _copy_parameter(parameter: nn.Parameter | None, memo: dict[int, Any]) -> nn.Parameter | None:
    if type(parameter) is not nn.Parameter or parameter.__dict__:
        return copy.deepcopy(parameter, memo)
    if id(parameter) not in memo:
        memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    return memo[id(parameter)]


def _culprit(model: nn.Module) -> str:
    for name, module in model.named_modules():
        for attribute, value in _attributes(module):
            try:
                copy.deepcopy(value)
            except Exception:
                return f"{name or type(model).__name__}.{attribute}"
    return type(model).__name__
