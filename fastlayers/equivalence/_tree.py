"""Tensors inside whatever a model takes and returns: lists, dicts, dataclasses, objects with attributes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Generator, type)


def nodes(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, node) of everything in `value`, containers before what they hold; shared parts once."""
    yield from _nodes(value, path, set())


def _nodes(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, _ATOMS):
        # The same tensor may be returned twice and counts twice; containers that hold themselves end here.
        if not isinstance(value, Tensor) and id(value) in seen:
            return
        seen.add(id(value))
    yield path, value
    for key, child in children(value):
        yield from _nodes(child, f"{path}{key}", seen)


def children(value: Any) -> list[tuple[str, Any]]:
    """The parts of a container with their keys (".name" or "[key]"); none for tensors, modules and atoms."""
    if isinstance(value, (Tensor, nn.Module, *_ATOMS)) or callable(value):
        return []
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", child) for name, child in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", child) for i, child in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return [(f".{name}", child) for name, child in getattr(value, "__dict__", {}).items()]


def tensors(value: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """(path, tensor) of every tensor in `value`."""
    return [(where, node) for where, node in nodes(value, path) if isinstance(node, Tensor)]


def copy_with(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """A deep copy of `value` with every tensor replaced; the same tensor by the same replacement."""
    memo: dict[int, Any] = {}
    for _, tensor in tensors(value):
        if id(tensor) not in memo:
            memo[id(tensor)] = replace(tensor)
    return copy.deepcopy(value, memo)


def is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The double precision type of `dtype`; integers and bool stay."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype
