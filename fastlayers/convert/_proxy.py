"""Stand-ins for tensors and sizes that write down what is done to them and know their values."""

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ._program import Node

if TYPE_CHECKING:
    from ._trace import Tracer

# Facts that hold for every call that passes the guards on the ranks of the inputs: no node is needed.
_RANKS = ("ndim", "is_sparse", "is_quantized", "layout", "is_nested", "names")
_READS_DATA = ("item", "tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "storage")


class Proxy:
    """One value of the traced function: a tensor, a size, a shape. Python's questions become guards."""

    __slots__ = ("_node", "_tracer")

    def __init__(self, tracer: "Tracer", node: Node) -> None:
        object.__setattr__(self, "_tracer", tracer)
        object.__setattr__(self, "_node", node)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance(x, Tensor) answers as for the value
        return type(self._node.value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = find_tracer((args, kwargs))
        return tracer.call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        value = self._node.value
        if name in _READS_DATA:
            raise self._tracer.data_dependent(f".{name}() reads the values of a tensor")
        found = self._tracer.look(value, name)
        if name in _RANKS or name.startswith("__"):
            return found
        if callable(found):
            if name == "dim":
                return lambda: self._tracer.look(value, "ndim")
            return lambda *args, **kwargs: self._tracer.method(self, name, args, kwargs)
        return self._tracer.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._tracer.untraceable(f"it assigns .{name} of a tensor")

    def _known(self, convert: Callable[[Any], Any]) -> Any:
        """Answer Python with the value, and guard on it."""
        return self._tracer.known(self._node, convert)

    def __bool__(self) -> bool:
        return self._known(bool)

    def __int__(self) -> int:
        return self._known(int)

    def __float__(self) -> float:
        return self._known(float)

    def __index__(self) -> int:
        return self._known(operator.index)

    def __hash__(self) -> int:
        return id(self._node) if isinstance(self._node.value, torch.Tensor) else self._known(hash)

    def __str__(self) -> str:
        return self._known(str)

    def __format__(self, spec: str) -> str:
        return self._known(lambda value: format(value, spec))

    def __len__(self) -> int:
        value = self._node.value
        if isinstance(value, torch.Tensor):
            return self._tracer.known(self._tracer.attribute(self, "shape")[0]._node, int)
        return len(value)

    def __iter__(self) -> Iterator[Any]:
        return iter([_item(self, i) for i in range(len(self))])

    def __contains__(self, item: Any) -> bool:
        raise self._tracer.untraceable("it asks whether a tensor or shape contains a value")

    def __reversed__(self) -> Iterator[Any]:
        return iter([_item(self, i) for i in reversed(range(len(self)))])


def _item(proxy: Any, index: int) -> Any:
    return proxy[index]


def find_tracer(value: Any) -> "Tracer":
    """The tracer of the first proxy in a nested value."""
    found = next(proxies_in(value), None)
    assert found is not None
    return found._tracer


def has_proxies(value: Any) -> bool:
    """Tell whether there is one, without asking it: its truth would become a guard."""
    return next(proxies_in(value), None) is not None


def proxies_in(value: Any) -> Iterator[Proxy]:
    """Every proxy in nested tuples, lists, dicts and slices."""
    if type(value) is Proxy:
        yield value
    elif type(value) is slice:
        yield from proxies_in((value.start, value.stop, value.step))
    elif isinstance(value, dict):
        for item in value.values():
            yield from proxies_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from proxies_in(item)


def _add_operator(name: str, function: Callable[..., Any], reflected: bool = False) -> None:
    def method(self: Proxy, *others: Any) -> Any:
        args = (*others, self) if reflected else (self, *others)
        return self._tracer.call(function, args, {})

    setattr(Proxy, name, method)


_BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
for _name in _BINARY.split():
    _dunder = _name.rstrip("_")
    _add_operator(f"__{_dunder}__", getattr(operator, _name))
    _add_operator(f"__r{_dunder}__", getattr(operator, _name), reflected=True)
    _add_operator(f"__i{_dunder}__", getattr(operator, f"i{_dunder}"))
for _name in ["neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem"]:
    _add_operator(f"__{_name}__", getattr(operator, _name))
