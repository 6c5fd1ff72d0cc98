"""Write a fused program as the Python source of a function."""

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ._match import Match
from ._operations import is_pure
from ._program import Node, Program, map_nodes, nodes_in
from ._trace import Untraceable, spell

_INFIX = {
    operator.add: "{} + {}", operator.sub: "{} - {}", operator.mul: "{} * {}", operator.truediv: "{} / {}",
    operator.floordiv: "{} // {}", operator.mod: "{} % {}", operator.matmul: "{} @ {}",
    operator.getitem: "{}[{}]", operator.eq: "{} == {}", operator.ne: "{} != {}", operator.lt: "{} < {}",
    operator.le: "{} <= {}", operator.gt: "{} > {}", operator.ge: "{} >= {}",
}  # fmt: skip
_SPACES = (
    ("torch", torch), ("F", F), ("torch.Tensor", torch.Tensor), ("operator", operator),
    ("torch.special", torch.special), ("torch.linalg", torch.linalg), ("torch.fft", torch.fft),
    ("torch._C._nn", torch._C._nn), ("torch._C.TensorBase", torch._C.TensorBase),
)  # fmt: skip


@dataclass
class Source:
    """The body of a function's fast path.

    Attributes:
        lines: statements, the last one returns.
        guards: the condition under which they may run.
        constants: objects the statements name that source cannot spell, each found by module and name.
    """

    lines: list[str] = field(default_factory=list)
    guards: tuple[str, ...] = ()
    constants: dict[str, tuple[str, str]] = field(default_factory=dict)


def write(match: Match, layer: Callable[[int], str], moved: Callable[[str], str]) -> Source:
    """Spell a match.

    Args:
        layer: the expression for fused layer number n.
        moved: the expression for a parameter, buffer or leaf module by its path from the owner, which may be
            part of a fused layer by now.
    """
    writer = _Writer(layer, moved)
    nodes, result = _order(match)
    for node in nodes:
        writer.statement(node)
    writer.source.lines.append(f"return {writer.spell(result)}")
    writer.source.guards = tuple(match.program.guards)
    return writer.source


def check_spelling(program: Program) -> None:
    """Raise Untraceable where an operation or constant has no name that source could use."""
    writer = _Writer(lambda n: "", lambda path: "")
    writer.names = {node: f"v{node.index}" for node in program.nodes}
    for node in program.nodes:
        if node.kind not in ("input", "tensor"):
            writer.expression(node)
    writer.spell(program.result)


def _order(match: Match) -> tuple[list[Node], Any]:
    """All operations of the fused program that somebody needs, in order, and what it returns."""
    lanes, replaced = match.lanes, match.replaced
    exits: dict[Node, Node] = {}
    wanted: dict[Any, list[int]] = {}

    def leave(node: Node) -> Node:
        """What stands for an original operation's result."""
        while node in replaced:
            node = replaced[node]
        if node not in lanes.pack_of:
            return node
        if node not in exits:
            exits[node] = Node("call", operator.getitem)
            pack, n = lanes.pack_of[node]
            wanted.setdefault(pack, []).append(n)
        return exits[node]

    order = lanes.schedule.order()
    assert order is not None
    units: dict[int, list[Node]] = {}
    for unit in order:
        nodes = lanes.emitted.get(unit)
        if nodes is None:
            nodes = [match.program.nodes[i] for i in lanes.schedule.members[unit]]
        units[unit] = [node for node in nodes if node not in replaced]
        for node in units[unit]:
            node.args, node.kwargs = map_nodes(node.args, leave), map_nodes(node.kwargs, leave)
    result = map_nodes(match.program.result, leave)
    for pack, which in wanted.items():
        units[lanes.schedule.unit[pack.nodes[0].index]] += _leave(pack, sorted(which), exits)
    return _needed([node for nodes in units.values() for node in nodes], result), result


def _leave(pack: Any, which: list[int], exits: dict[Node, Node]) -> list[Node]:
    """Hand out single lanes as tensors of their own, for callers may change them in place."""
    if len(which) > 1 and 2 * len(which) >= len(pack.nodes):
        pieces = Node("call", torch.unbind_copy, (pack.stacked, 0))
        new = [pieces]
        for n in which:
            exits[pack.nodes[n]].args = (pieces, n)
            new.append(exits[pack.nodes[n]])
        return new
    new = []
    for n in which:
        view = Node("call", operator.getitem, (pack.stacked, n))
        leaving = exits[pack.nodes[n]]
        leaving.target, leaving.args = torch.clone, (view,)
        leaving.kwargs = {"memory_format": torch.contiguous_format}
        new += [view, leaving]
    return new


def _needed(nodes: list[Node], result: Any) -> list[Node]:
    used = set(nodes_in(result))
    kept = []
    for node in reversed(nodes):
        if node in used or not is_pure(node):
            kept.append(node)
            used.update(node.operands())
    return kept[::-1]


class _Writer:
    def __init__(self, layer: Callable[[int], str], moved: Callable[[str], str]) -> None:
        self.layer, self.moved = layer, moved
        self.source = Source()
        self.names: dict[Node, str] = {}

    def statement(self, node: Node) -> None:
        if node.kind == "input":
            self.names[node] = node.target
            return
        if node.kind == "tensor":
            self.names[node] = self.moved(node.target)
            return
        text = self.expression(node)
        if node.target in (operator.setitem, torch.Tensor.copy_):
            self.source.lines.append(text)
            return
        self.names[node] = name = f"v{len(self.names)}"
        self.source.lines.append(f"{name} = {text}")

    def expression(self, node: Node) -> str:
        args = [self.spell(a) for a in node.args]
        named = [f"{k}={self.spell(v)}" for k, v in node.kwargs.items()]
        inside = ", ".join([*args, *named])
        if node.kind == "fused":
            return f"{self.layer(node.target)}({inside})"
        if node.kind == "module":
            return f"{self.moved(node.target)}({inside})"
        if node.kind == "attribute":
            return f"{args[0]}.{node.target}"
        if node.kind == "method":
            return f"{args[0]}.{node.target}({', '.join([*args[1:], *named])})"
        if node.target is operator.setitem:
            return f"{args[0]}[{args[1]}] = {args[2]}"
        if node.target in _INFIX and not named:
            return _INFIX[node.target].format(*args)
        return f"{self._function(node.target)}({inside})"

    def spell(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, slice):
            return f"slice({self.spell(value.start)}, {self.spell(value.stop)}, {self.spell(value.step)})"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._constant(type(value))}({', '.join(self.spell(v) for v in value)})"
        if type(value) is tuple or isinstance(value, torch.Size):
            return "(" + "".join(f"{self.spell(v)}, " for v in value) + ")"
        if type(value) is list:
            return "[" + ", ".join(self.spell(v) for v in value) + "]"
        if isinstance(value, dict):
            items = ", ".join(f"{self.spell(k)}: {self.spell(v)}" for k, v in value.items())
            return "{" + items + "}" if type(value) is dict else f"{self._constant(type(value))}({{{items}}})"
        if value is Ellipsis:
            return "..."
        if isinstance(value, (torch.memory_format, torch.layout, torch.dtype)):
            return repr(value)
        if callable(value):
            return self._function(value)
        return spell(value)

    def _function(self, function: Any) -> str:
        name = getattr(function, "__name__", "")
        for space, module in _SPACES:
            if name.isidentifier() and getattr(module, name, None) is function:
                return f"{space}.{name}"
        return self._constant(function)

    def _constant(self, value: Any) -> str:
        if inspect.ismethod(value) and inspect.isclass(value.__self__):
            return f"{self._constant(value.__self__)}.{value.__name__}"
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        found: Any = inspect.sys.modules.get(module or "builtins")  # type: ignore[attr-defined]
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not value:
            raise Untraceable("call-site-not-traced", f"it uses {value!r}, which has no name to find it by")
        key = f"_{name.replace('.', '_')}"
        self.source.constants[key] = (module or "builtins", name)
        return key
