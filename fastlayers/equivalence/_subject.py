"""A private copy of a model: put in a mode and a precision, run, and put back as it was."""

from __future__ import annotations

import collections
import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._tree import is_differentiable, tensors, wide

LONG_LIST = 64  # Linears of one list that are worth a tensor of their own

_OF_A_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_PLAIN_LINEAR = frozenset(nn.Linear(1, 1).__dict__)
_HOOKS = [name for name in _PLAIN_LINEAR if name.endswith("_hooks")]


class Subject:
    """A copy of `model` whose state (buffers, attributes, train flags) is restored after every run.

    `lists`: paths of equal plain Linears; the parameters of a long list are kept as slices of one tensor,
    since 20,000 single ones take autograd and every cast a second each.
    """

    def __init__(self, model: nn.Module, lists: Sequence[Sequence[str]] = ()) -> None:
        self._stacks = [s for paths in lists for s in _stackable(model, paths)]
        self.model = copy_model(
            model, {id(model.get_submodule(path)) for s in self._stacks for path in s.paths}
        )
        for stack in self._stacks:
            stack.build(self.model)
        stacked = {name for stack in self._stacks for name in stack.names}
        named = self.model.named_parameters(remove_duplicate=False)
        self._single = [(name, p) for name, p in named if name not in stacked]
        self._modules = list(self.model.named_modules(remove_duplicate=False))
        self._dtypes = {id(t): t.dtype for t in self._owned()}
        self._state = _State(self.model)
        self.widened = False

    @property
    def cheap_slices(self) -> list[str]:
        """The Linears of long lists: autograd is slow where they read slices of one tensor."""
        return [path for stack in self._stacks if stack.leaf == "weight" for path in stack.paths]

    def parameters(self) -> dict[str, Tensor]:
        """All parameters by the model's names."""
        named: dict[str, Tensor] = dict(self._single)
        for stack in self._stacks:
            named.update(zip(stack.names, stack.whole.detach().unbind(0), strict=True))
        return named

    def gradients(self, called: Container[str]) -> dict[str, Tensor | None]:
        """What backward left; for Linears of long lists, None unless they were `called`."""
        found: dict[str, Tensor | None] = {n: p.grad for n, p in self._single if p.requires_grad}
        for stack in self._stacks:
            grads = [None] * len(stack.names) if stack.whole.grad is None else stack.whole.grad.unbind(0)
            for path, name, grad in zip(stack.paths, stack.names, grads, strict=True):
                found[name] = grad if path in called else None
        return found

    def buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now, by name, copied."""
        return {
            f"{path}.{name}".lstrip("."): buffer.detach().clone()
            for path, module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def _owned(self) -> list[Tensor]:
        """Parameters and buffers, each once."""
        buffers = (b for _, m in self._modules for b in m._buffers.values() if b is not None)
        parameters = (*(p for _, p in self._single), *(stack.whole for stack in self._stacks))
        return list({id(t): t for t in (*parameters, *buffers)}.values())

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
        if self.widened:
            return
        self.restore()
        self._cast(lambda t: wide(t.dtype))
        if unregistered:
            for _, module in self._modules:
                for _, value in _attributes(module):
                    _widen_attribute(value)
        self._state, self.widened = _State(self.model), True

    def narrow(self) -> None:
        """Back to the dtypes of the model itself: exact, since widening was."""
        if not self.widened:
            return
        self.restore()
        self._cast(lambda t: self._dtypes[id(t)])
        self._state, self.widened = _State(self.model), False

    def _cast(self, dtype: Callable[[Tensor], torch.dtype]) -> None:
        for tensor in self._owned():
            tensor.data = tensor.data.to(dtype(tensor))
        for stack in self._stacks:
            stack.attach()

    @contextlib.contextmanager
    def changed(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """With other values of its parameters."""
        leaves = [p for _, p in self._single] + [stack.whole for stack in self._stacks]
        kept = [(p, p.data) for p in {id(p): p for p in leaves}.values()]
        try:
            for parameter, value in kept:
                parameter.data = change(value)
            for stack in self._stacks:
                stack.attach()
            yield
        finally:
            for parameter, value in kept:
                parameter.data = value
            for stack in self._stacks:
                stack.attach()

    def restore(self) -> None:
        self._state.restore()
        for _, parameter in self._single:
            parameter.grad = None
        for stack in self._stacks:
            stack.whole.grad = None


class _Stack:
    """One parameter of a long list of Linears, as slices of one tensor."""

    def __init__(
        self, paths: Sequence[str], leaf: str, originals: list[nn.Module], values: list[Tensor]
    ) -> None:
        self.paths, self.leaf, self.originals = list(paths), leaf, originals
        self.names = [f"{path}.{leaf}" for path in paths]
        self.whole = nn.Parameter(torch.stack([value.detach() for value in values]))
        self._modules: list[nn.Module] = []

    def build(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._modules = [modules[path] for path in self.paths]
        self.attach()

    def attach(self) -> None:
        for module, part in zip(self._modules, self.whole.unbind(0), strict=True):
            module._parameters[self.leaf] = part  # type: ignore[assignment]


def _stackable(model: nn.Module, paths: Sequence[str]) -> list[_Stack]:
    """Stacks for a list that is long, and whose parameters are nothing out of the ordinary."""
    if len(paths) < LONG_LIST:
        return []
    modules = dict(model.named_modules())
    linears = [modules[path] for path in paths if path in modules]
    holders = collections.Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    stacks = []
    for leaf in ("weight", "bias"):
        values = [linear._parameters[leaf] for linear in linears if _is_plain_linear(linear)]
        present = [p for p in values if type(p) is nn.Parameter and not p.__dict__ and holders[id(p)] == 1]
        if leaf == "bias" and not any(p is not None for p in values):
            continue
        alike = len({(p.shape, p.dtype, p.device) for p in present}) == 1
        if len(present) != len(paths) or not alike or not all(p.requires_grad and p.is_leaf for p in present):
            return []
        stacks.append(_Stack(paths, leaf, linears, list(present)))
    return stacks


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


def copy_model(model: nn.Module, without_parameters: Container[int] = ()) -> nn.Module:
    """`copy.deepcopy(model)`, also with results of earlier runs among its attributes; quick for many Linears.

    `without_parameters`: ids of plain Linears whose copies keep the original's parameters, to be replaced.
    Raises TypeError that names the first module that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        if _is_plain_linear(module):
            memo[id(module)] = _copy_linear(module, None if id(module) in without_parameters else memo)
            continue
        for _, tensor in tensors([v for _, v in _attributes(module)]):
            if tensor.grad_fn is not None:  # deepcopy refuses it; without its history it is just a value
                memo[id(tensor)] = tensor.detach().clone()
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise TypeError(f"verify: the model cannot be copied ({_culprit(model)}): {error}") from error


def _is_plain_linear(module: nn.Module) -> bool:
    entries = module.__dict__
    return (
        type(module) is nn.Linear and entries.keys() == _PLAIN_LINEAR and not any(entries[k] for k in _HOOKS)
    )


def _copy_linear(linear: nn.Module, memo: dict[int, Any] | None) -> nn.Module:
    """What deepcopy does to a plain Linear, 10 times as fast: 10,000 of them take 2 s there."""
    new = nn.Linear.__new__(nn.Linear)
    entries = new.__dict__
    for name, value in linear.__dict__.items():
        entries[name] = type(value)(value) if isinstance(value, (dict, set)) else value
    if memo is not None:
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
