"""Run the model once and see which functions call its Linears, then take down one call of each.

A candidate function is a method of a module of the model that runs while a candidate Linear is called, from
the innermost outwards. Its arguments are taken down at its entry, since a function may rebind or change them.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ._types import ConversionError

_MAX_FRAMES = 60


@dataclass
class Function:
    """A method that was running while Linears were called.

    Attributes:
        owner: path of the module it ran on.
        name: of the method.
        depth: how many other candidate functions it was called from, at most.
        calls: one tuple of (args, kwargs) for each set of modules and constants it was given.
        linears: paths of the candidates called in it, in order.
    """

    owner: str
    name: str
    depth: int
    linears: dict[str, None] = field(default_factory=dict)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


@dataclass
class Observation:
    """What one run showed: the functions, and how often each candidate was called and from where."""

    functions: dict[tuple[str, str], Function] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    sites: dict[str, str] = field(default_factory=dict)


def run_example(model: nn.Module, example_inputs: Any) -> Any:
    """Call the model on a tuple of positional or a dict of keyword arguments."""
    if isinstance(example_inputs, dict):
        return model(**example_inputs)
    return model(*example_inputs)


def observe(model: nn.Module, example_inputs: Any, candidates: dict[str, nn.Module]) -> Observation:
    """Run the model twice on copies of the inputs: to see the functions, and to take down their arguments.

    Raises ConversionError when the model itself fails on the inputs.
    """
    found = Observation(counts=dict.fromkeys(candidates, 0))
    paths = {id(module): path for path, module in model.named_modules()}
    look = _look(found, {id(module): path for path, module in candidates.items()}, _Callers(paths))
    forwards = {kind: kind.forward for kind in {type(module) for module in candidates.values()}}
    for kind, forward in forwards.items():
        kind.forward = _seen(forward, look)
    try:
        _run(model, example_inputs)
    finally:
        for kind, forward in forwards.items():
            kind.forward = forward
    _take_down(model, example_inputs, found)
    return found


def _run(model: nn.Module, example_inputs: Any) -> None:
    try:
        run_example(model, copy_tensors(example_inputs))
    except Exception as error:
        raise ConversionError(
            f"the model fails on the example inputs: {type(error).__name__}: {error}"
        ) from error


def copy_tensors(value: Any) -> Any:
    """Copy nested containers and clone the tensors in them; the rest is kept."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        items = [copy_tensors(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return type(value)((key, copy_tensors(item)) for key, item in value.items())
    return value


def _seen(forward: Callable[..., Any], look: Callable[[nn.Module], None]) -> Callable[..., Any]:
    """A Linear's forward that is seen being called, also where people call it without the module."""

    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        look(module)
        return forward(module, *args, **kwargs)

    return watched


def _look(found: Observation, candidates: dict[int, str], callers: "_Callers") -> Callable[[nn.Module], None]:
    def look(module: nn.Module) -> None:
        path = candidates.get(id(module))
        if path is None:
            return
        found.counts[path] += 1
        chain, line = callers.of(sys._getframe(2))
        if chain and path not in found.sites:
            found.sites[path] = line
        for level, key in enumerate(reversed(chain)):
            function = found.functions.setdefault(key, Function(*key, depth=level))
            function.depth = max(function.depth, level)
            function.linears.setdefault(path)

    return look


class _Callers:
    """The methods of the model's modules that are running, innermost first."""

    def __init__(self, paths: dict[int, str]) -> None:
        self.paths = paths
        self._last: tuple[Any, list[tuple[str, str]]] = (None, [])

    def of(self, inner: Any) -> tuple[list[tuple[str, str]], str]:
        """The methods, as (module path, name), and where in the innermost the call stands."""
        while inner is not None and _method(inner, self.paths) is None:
            inner = inner.f_back
        if inner is None:
            return [], ""
        if self._last[0] is not inner:  # a loop calls all its Linears from one frame
            self._last = inner, self._chain(inner)
        file = inner.f_code.co_filename.rpartition("/")[2]
        return self._last[1], f"{inner.f_code.co_name}, {file}:{inner.f_lineno}"

    def _chain(self, frame: Any) -> list[tuple[str, str]]:
        chain: list[tuple[str, str]] = []
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            method = _method(frame, self.paths)
            if method is not None and (not chain or chain[-1] != method):
                chain.append(method)
            frame = frame.f_back
        return chain


def _method(frame: Any, paths: dict[int, str]) -> tuple[str, str] | None:
    """The module and name, if a frame runs a method of one of the model's modules."""
    code, name = frame.f_code, frame.f_code.co_name
    if not code.co_varnames or code.co_argcount == 0:
        return None
    module = frame.f_locals.get(code.co_varnames[0])
    if not isinstance(module, nn.Module) or id(module) not in paths:
        return None
    method = getattr(type(module), name, None)
    if getattr(method, "__code__", None) is not code or name in _INTERNAL:
        return None
    return paths[id(module)], name


_INTERNAL = {"_call_impl", "_wrapped_call_impl", "__call__"}


def _take_down(model: nn.Module, example_inputs: Any, found: Observation) -> None:
    """Run again, with every candidate function writing down what it is given."""
    modules = dict(model.named_modules())
    watched = []
    for function in found.functions.values():
        module = modules[function.owner]
        if function.name in vars(module):
            continue  # an attribute of the instance hides the method
        setattr_plain(module, function.name, _recorder(module, function))
        watched.append((module, function.name))
    try:
        _run(model, example_inputs)
    finally:
        for module, name in watched:
            module.__dict__.pop(name, None)


def setattr_plain(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of the instance, past nn.Module's own bookkeeping."""
    object.__setattr__(module, name, value)


def _recorder(module: nn.Module, function: Function) -> Callable[..., Any]:
    original = getattr(module, function.name)
    seen: set[Any] = set()

    def record(*args: Any, **kwargs: Any) -> Any:
        key = _key((args, kwargs))
        if key not in seen:
            seen.add(key)
            function.calls.append((copy_tensors(args), copy_tensors(kwargs)))
        return original(*args, **kwargs)

    return record


def _key(value: Any) -> Any:
    """What makes a call another case: its modules, its constants, the ranks of its tensors."""
    if isinstance(value, Tensor):
        return value.ndim
    if isinstance(value, (tuple, list)):
        return tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _key(item)) for key, item in value.items())
    return id(value) if isinstance(value, nn.Module) else str(value)
