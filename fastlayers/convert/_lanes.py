"""Lanes: the same operation done N times side by side becomes one operation on a stack.

A pack is N operations of one kind, none of which leads to another. It is replaced by one operation whose
result holds lane n's in ``stacked[n]``: the lanes are always the first dimension, which costs nothing, since
moving dimensions is a view and pointwise operations keep the order in memory. Packs start at the Linears and
grow upwards through what feeds them and downwards through what reads them; `_joins` closes them.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ._operations import Lifted, is_view, lift, lift_module
from ._program import Node, Program, map_nodes, nodes_in
from ._schedule import Schedule
from ._trace import spell_path


@dataclass(eq=False)
class Pack:
    """N operations that are one now: lane n of ``stacked`` (N, *) is the result of ``nodes[n]``."""

    nodes: tuple[Node, ...]
    stacked: Node
    linear: bool = False
    uses: int = 0

    @property
    def ndim(self) -> int:
        return self.nodes[0].value.ndim


@dataclass
class Lanes:
    """The packs of one program, and the operations that replace theirs.

    Attributes:
        emitted: for each merged unit, the operations in its place.
        pack_of: the pack and lane of each merged operation.
    """

    owner: nn.Module
    program: Program
    schedule: Schedule
    pin_shapes: Callable[[], None]
    guard: Callable[[str, str], object]
    emitted: dict[int, list[Node]] = field(default_factory=dict)
    pack_of: dict[Node, tuple[Pack, int]] = field(default_factory=dict)
    packs: list[Pack] = field(default_factory=list)
    users: dict[Node, list[Node]] = field(init=False)
    written: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.users = defaultdict(list)
        for node in self.program.nodes:
            for operand in dict.fromkeys(node.operands()):
                self.users[operand].append(node)
        self.written = {s for node in self.program.nodes for s in node.writes}

    # Building packs.

    def seed(
        self, calls: Sequence[Node], emit: Callable[[Node | None, Node | None, list[Node]], Node]
    ) -> Pack | None:
        """Make one pack of Linear calls; ``emit(stacked, shared, new)`` is the fused call on their input."""
        if not self.schedule.merge(calls):
            return None
        unit = self.schedule.unit[calls[0].index]
        new: list[Node] = []
        inputs = [node.args[0] for node in calls]
        shared = inputs[0] if all(node is inputs[0] for node in inputs) else None
        stacked = None if shared else self.operand(inputs, new, or_stack=True)
        fused = emit(stacked, shared, new)
        new.append(fused)
        node = call(torch.Tensor.movedim, fused, -2, 0)
        new.append(node)
        return self._add(Pack(tuple(calls), node, linear=True), unit, new)

    def _add(self, pack: Pack, unit: int, new: list[Node]) -> Pack:
        self.emitted[unit] = new
        for n, node in enumerate(pack.nodes):
            self.pack_of[node] = (pack, n)
        self.packs.append(pack)
        return pack

    def pack(self, nodes: Sequence[Node]) -> Pack | None:
        """Make one pack of the same operation on N operands each, if it is one we know how to stack."""
        first = nodes[0]
        if len(set(nodes)) < len(nodes) or any(node in self.pack_of for node in nodes):
            return None
        if not isinstance(first.value, Tensor) or any(n.writes or tainted(n, self.written) for n in nodes):
            return None
        lift_one = self._lift(nodes)
        if lift_one is None or not _alike(nodes):
            return None
        rank = first.value.ndim
        if not self.schedule.merge(nodes):
            return None
        unit = self.schedule.unit[first.index]
        new: list[Node] = []
        operands: dict[Node, Node] = {}
        for position, node in enumerate(nodes_in((first.args, first.kwargs))):
            if not isinstance(node.value, Tensor):
                continue
            lanes = [list(nodes_in((n.args, n.kwargs)))[position] for n in nodes]
            if all(lane is node for lane in lanes):
                if node.value.ndim > rank:
                    return None
                continue
            stacked = self.operand(lanes, new, or_stack=False)
            if stacked is None:
                return None
            if node.value.ndim < rank and lift_one.pointwise:
                stacked = call(operator.getitem, stacked, (slice(None), *[None] * (rank - node.value.ndim)))
                new.append(stacked)
            operands[node] = stacked
        if not operands:
            return None
        args = map_nodes(lift_one.args, lambda node: operands.get(node, node))
        kwargs = map_nodes(lift_one.kwargs, lambda node: operands.get(node, node))
        stacked = Node(first.kind, first.target, args, kwargs, line=first.line)
        new.append(stacked)
        for pack in {self.pack_of[n][0] for n in nodes_in((first.args, first.kwargs)) if n in self.pack_of}:
            pack.uses += 1
        return self._add(Pack(tuple(nodes), stacked), unit, new)

    def _lift(self, nodes: Sequence[Node]) -> Lifted | None:
        if nodes[0].kind != "module":
            return lift(nodes)
        modules = [self.owner.get_submodule(node.target) for node in nodes]
        if not lift_module(modules):
            return None
        places = dict.fromkeys(node.target for node in nodes)
        if len(places) > 1 and isinstance(modules[0], nn.Dropout):
            flags = ", ".join(f"{spell_path(path)}.training" for path in places)
            self.guard(f"len({{{flags}}}) == 1", "one dropout acts for all")
        return Lifted(nodes[0].args, nodes[0].kwargs, True)

    # Operands.

    def operand(self, lanes: Sequence[Node], new: list[Node], or_stack: bool) -> Node | None:
        """Give the stack (N, *) of one value per lane; operations it takes are appended to ``new``."""
        for attempt in (self._of_pack, self._of_views, self._of_producers):
            found = attempt(lanes, new)
            if found is not None:
                return found
        if not or_stack:
            return None
        self._same_shapes(lanes)
        node = call(torch.stack, list(lanes))
        new.append(node)
        return node

    def _of_pack(self, lanes: Sequence[Node], new: list[Node]) -> Node | None:
        if any(lane not in self.pack_of for lane in lanes):
            return None
        packs = {self.pack_of[lane][0] for lane in lanes}
        if len(packs) > 1 or any(tainted(lane, self.written) for lane in lanes):
            return None
        pack = packs.pop()
        return take(pack.stacked, 0, [self.pack_of[lane][1] for lane in lanes], len(pack.nodes), new)

    def _of_views(self, lanes: Sequence[Node], new: list[Node]) -> Node | None:
        """Lanes that are parts of one tensor, or views of such parts: one view of the whole tensor."""
        first = lanes[0]
        if any(lane in self.pack_of for lane in lanes) or not _alike(lanes, index=True):
            return None
        source = first.args[0] if first.args and isinstance(first.args[0], Node) else None
        if source is None:
            return None
        if all(lane.args[0] is source for lane in lanes):
            return _parts(lanes, source, new)
        if not is_view(first):
            return None
        lift_one = lift(lanes)
        if lift_one is None or not _alike(lanes):
            return None
        stacked = self._of_views([lane.args[0] for lane in lanes], new)
        if stacked is None:
            return None
        args = map_nodes(lift_one.args, lambda node: stacked if node is source else node)
        node = Node(first.kind, first.target, args, lift_one.kwargs, line=first.line)
        new.append(node)
        return node

    def _of_producers(self, lanes: Sequence[Node], new: list[Node]) -> Node | None:
        pack = self.pack(lanes)
        return None if pack is None else pack.stacked

    def _same_shapes(self, lanes: Sequence[Node]) -> None:
        """Stacking needs equal shapes: they are equal by what the code does, or a guard says so."""
        if _congruent(lanes, self.pack_of):
            return
        if all(lane.kind == "input" for lane in lanes):
            for lane in lanes[1:]:
                self.guard(f"{lane.target}.shape == {lanes[0].target}.shape", "inputs that are stacked")
        else:
            self.pin_shapes()

    # Growing.

    def grow(self) -> None:
        """Extend packs through the operations that read all their lanes alike."""
        done = 0
        while done < len(self.packs):
            pack = self.packs[done]
            done += 1
            if any(tainted(node, self.written) for node in pack.nodes):
                continue
            for nodes in self._readers(pack):
                self.pack(nodes)

    def _readers(self, pack: Pack) -> list[tuple[Node, ...]]:
        """For each operation that reads lane 0, the same operation on every other lane."""
        lanes = [self._by_signature(node) for node in pack.nodes]
        found = []
        for signature, nodes in lanes[0].items():
            if all(len(lane.get(signature, ())) == len(nodes) for lane in lanes):
                found += [tuple(lane[signature][k] for lane in lanes) for k in range(len(nodes))]
        return found

    def _by_signature(self, node: Node) -> dict[Any, list[Node]]:
        result: dict[Any, list[Node]] = defaultdict(list)
        for user in self.users[node]:
            if user not in self.pack_of:
                result[_signature(user)].append(user)
        return result


def call(function: Any, *args: Any, **kwargs: Any) -> Node:
    return Node("call", function, args, kwargs)


def tainted(node: Node, written: set[int]) -> bool:
    """Tell whether the memory of a result is changed in place somewhere."""
    return isinstance(node.value, Tensor) and node.value.untyped_storage()._cdata in written


def _signature(node: Node) -> Any:
    target = node.target if node.kind != "module" else None
    return node.kind, target, len(node.args), tuple(node.kwargs)


def _alike(nodes: Sequence[Node], index: bool = False) -> bool:
    """Tell whether operations differ in nothing but the tensors they read (and, with ``index``, an index)."""
    first = nodes[0]
    for node in nodes[1:]:
        if _signature(node) != _signature(first) or node.value.ndim != first.value.ndim:
            return False
        if index and node.args and first.args and node.args[0] is first.args[0]:
            continue
        if map_nodes(node.args, _mask) != map_nodes(first.args, _mask):
            return False
        if map_nodes(node.kwargs, _mask) != map_nodes(first.kwargs, _mask):
            return False
    return True


def _mask(node: Node) -> Any:
    return None if isinstance(node.value, Tensor) else node


def _congruent(lanes: Sequence[Node], packs: dict[Node, Any], depth: int = 8) -> bool:
    """Tell whether results have equal shapes for any sizes of the inputs, by how they are computed."""
    first = lanes[0]
    if all(lane is first for lane in lanes):
        return True
    if all(lane in packs for lane in lanes):
        return len({id(packs[lane][0]) for lane in lanes}) == 1
    if depth == 0 or any(_signature(lane) != _signature(first) for lane in lanes):
        return False
    if first.kind == "input" or first.value.shape != lanes[-1].value.shape:
        return False
    if first.kind == "call" and first.target is operator.getitem and first.args[0].kind != "input":
        pieces = first.args[0].value
        if isinstance(pieces, (tuple, list)) and len({lane.args[0] for lane in lanes}) == 1:
            return True  # a guard on the size they are cut from is there already
    if not _alike(lanes) and first.target is not operator.getitem:
        return False
    operands = [list(lane.operands()) for lane in lanes]
    return all(_congruent([o[k] for o in operands], packs, depth - 1) for k in range(len(operands[0])))


def range_or_list(which: list[int]) -> slice | list[int]:
    """An index that chooses these: a slice, which costs nothing, where their distance is constant."""
    steps = {b - a for a, b in pairwise(which)}
    if len(which) > 1 and (len(steps) > 1 or min(steps) < 1):
        return list(which)
    step = steps.pop() if steps else 1
    return slice(which[0], which[-1] + 1, step if step != 1 else None)


def take(stacked: Node, dim: int, which: list[int], size: int | None, new: list[Node]) -> Node:
    """Choose some of the lanes along a dimension: all, a range with a step, or any."""
    if size is not None and which == list(range(size)):
        return stacked
    lead, index = (slice(None),) * dim, range_or_list(which)
    node = call(operator.getitem, stacked, (*lead, index))
    new.append(node)
    return node


def _parts(lanes: Sequence[Node], source: Node, new: list[Node]) -> Node | None:
    """One view (N, *) of the tensor that the lanes are cut from, or of what it comes apart into."""
    if any(lane.kind != "call" or lane.target is not operator.getitem for lane in lanes):
        return None
    if isinstance(source.value, (tuple, list)):
        return _pieces(lanes, source, new)
    indices = [lane.args[1] if isinstance(lane.args[1], tuple) else (lane.args[1],) for lane in lanes]
    first = indices[0]
    if any(len(index) != len(first) for index in indices) or any(nodes_in(first)):
        return None
    if any(isinstance(part, (list, Tensor, bool)) for index in indices for part in index):
        return None
    differing = [p for p in range(len(first)) if any(index[p] != first[p] for index in indices)]
    if len(differing) != 1:
        return None
    at = differing[0]
    given = [index[at] for index in indices]
    dims = source.value.ndim - sum(part is not None and part is not Ellipsis for part in first)
    kept = sum(dims if part is Ellipsis else not isinstance(part, int) for part in first[:at])
    if not all(type(part) is int for part in given):
        return _windows(given, first, at, kept, source, new)
    if any(part < 0 for part in given):
        return None
    chosen = call(operator.getitem, source, (*first[:at], range_or_list(given), *first[at + 1 :]))
    if isinstance(chosen.args[1][at], list):  # a list beside other indices would move its dimension
        chosen = call(operator.getitem, source, (*first[:at], slice(None), *first[at + 1 :]))
        new.append(chosen)
        chosen = call(operator.getitem, chosen, ((slice(None),) * kept + (list(given),)))
    new.append(chosen)
    if kept == 0:
        return chosen
    node = call(torch.Tensor.movedim, chosen, kept, 0)
    new.append(node)
    return node


def _windows(
    given: list[Any], index: tuple[Any, ...], at: int, kept: int, source: Node, new: list[Node]
) -> Node | None:
    """Lanes that are ranges of one length, a constant step apart."""
    if any(
        type(part) is not slice or type(part.start) is not int or type(part.stop) is not int for part in given
    ):
        return None
    if any(part.step not in (None, 1) or part.start < 0 or part.stop < part.start for part in given):
        return None
    lengths = {part.stop - part.start for part in given}
    steps = {b.start - a.start for a, b in pairwise(given)}
    if len(lengths) != 1 or len(steps) != 1 or min(steps) < 1:
        return None
    length, step = lengths.pop(), steps.pop()
    span = slice(given[0].start, given[-1].stop)
    whole = call(operator.getitem, source, (*index[:at], span, *index[at + 1 :]))
    unfolded = call(torch.Tensor.unfold, whole, kept, length, step)
    lanes_first = call(torch.Tensor.movedim, unfolded, (kept, -1), (0, kept + 1))
    new += [whole, unfolded, lanes_first]
    return lanes_first


def _pieces(lanes: Sequence[Node], source: Node, new: list[Node]) -> Node | None:
    """Lanes that come from one chunk, split or unbind."""
    name = source.target if isinstance(source.target, str) else getattr(source.target, "__name__", "")
    tensor = source.args[0] if source.args else None
    if name not in ("chunk", "split", "unbind") or not isinstance(tensor, Node):
        return None
    position = 1 if name == "unbind" else 2
    dim = source.kwargs.get("dim", source.args[position] if len(source.args) > position else 0)
    if type(dim) is not int:
        return None
    dim %= tensor.value.ndim
    which = [lane.args[1] for lane in lanes]
    count = len(source.value)
    stacked = tensor
    if name != "unbind":
        sizes = {piece.shape[dim] for piece in source.value}
        if len(sizes) != 1:
            return None
        stacked = call(torch.Tensor.unflatten, tensor, dim, (count, sizes.pop()))
        new.append(stacked)
    chosen = take(stacked, dim, which, count, new)
    node = call(torch.Tensor.movedim, chosen, dim, 0) if dim else chosen
    if dim:
        new.append(node)
    return node
