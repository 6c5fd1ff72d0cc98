"""A traced function as a program: one node for each operation, in the order in which they ran.

Unlike a torch.fx graph every node carries the value it had on the example inputs, so that questions about
shapes, storages and aliasing have answers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Node:
    """One operation.

    Attributes:
        kind: "input" (target: expression over the function's arguments), "call" (a function), "method" (its
            name), "attribute" (its name), "module" (the path of a leaf module) or "tensor" (the path of a
            parameter or buffer).
        value: the result on the example inputs.
        line: where the traced function ran it, "model.py:88".
        writes: the storages it changed in place.
        dynamic: its shape depends on the values of tensors, not on their shapes alone.
        random: it draws random numbers (or does in training mode).
    """

    kind: str
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    value: Any = None
    line: str = ""
    index: int = 0
    writes: frozenset[int] = frozenset()
    random: bool = False
    dynamic: bool = False

    def operands(self) -> Iterator["Node"]:
        """The nodes this one reads."""
        yield from nodes_in(self.args)
        if self.kwargs:
            yield from nodes_in(self.kwargs)

    def __repr__(self) -> str:
        return f"%{self.index}"


def nodes_in(value: Any) -> Iterator[Node]:
    """Every node in nested tuples, lists, dicts and slices."""
    kind = type(value)
    if kind is Node:
        yield value
    elif kind is slice:
        yield from nodes_in((value.start, value.stop, value.step))
    elif isinstance(value, (tuple, list)):
        for item in value:
            if type(item) is Node:
                yield item
            elif not isinstance(item, (int, float, str)):
                yield from nodes_in(item)
    elif isinstance(value, dict):
        yield from nodes_in(tuple(value.values()))


def map_nodes(value: Any, change: Callable[[Node], Any]) -> Any:
    """Copy nested tuples, lists, dicts and slices with every node replaced by ``change(node)``."""
    kind = type(value)
    if kind is Node:
        return change(value)
    if kind is tuple:
        return tuple([map_nodes(item, change) for item in value])
    if kind is int or kind is str or kind is float or value is None:
        return value
    if isinstance(value, tuple):
        items = [map_nodes(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_nodes(item, change) for item in value]
    if isinstance(value, dict):
        return type(value)((key, map_nodes(item, change)) for key, item in value.items())
    if isinstance(value, slice):
        return slice(*(map_nodes(item, change) for item in (value.start, value.stop, value.step)))
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nested value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def storages(value: Any) -> set[int]:
    """The storages that the tensors of a value lie in."""
    return {t.untyped_storage()._cdata for t in tensors_in(value) if t.layout == torch.strided}


@dataclass
class Program:
    """What one call of a function did.

    Attributes:
        nodes: all operations in order.
        result: what the function returned, nested, with nodes in the place of tensors and sizes.
        guards: conditions under which another call does the same, as expressions over the function's
            arguments and `self`; each with the reason it is there.
    """

    nodes: list[Node] = field(default_factory=list)
    result: Any = None
    guards: dict[str, str] = field(default_factory=dict)
