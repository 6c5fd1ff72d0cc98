"""Which Linear calls of a traced function become one, and as which layer."""

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ._joins import Joins
from ._lanes import Lanes, call
from ._program import Node, Program, nodes_in
from ._schedule import Schedule
from ._survey import Traits


@dataclass(frozen=True)
class Fusion:
    """One new layer: "linear_list" or "wide_linear", the paths it replaces (from the owner), their sizes."""

    rule: str
    paths: tuple[str, ...]
    traits: Traits
    out_features: tuple[int, ...]


@dataclass
class Match:
    """A program in which groups of Linear calls are fused.

    Attributes:
        fusions: the new layers; a node of kind "fused" calls one, by its position here.
        replaced: for an original operation, the one whose result stands for its own.
        refused: paths that stay, with the reason code and words.
    """

    program: Program
    lanes: Lanes
    fusions: list[Fusion]
    replaced: dict[Node, Node]
    refused: dict[str, tuple[str, str]]


def match(
    owner: nn.Module,
    program: Program,
    traits: dict[str, Traits],
    pin_shapes: Callable[[], None],
    allowed: Callable[[Sequence[str]], bool] = lambda paths: len(paths) > 1,
) -> Match:
    """Fuse what can be fused. ``traits``: the candidates, by path from the owner, in the model's order."""
    schedule = Schedule(program)
    lanes = Lanes(owner, program, schedule, pin_shapes, lambda g, why: program.guards.setdefault(g, why))
    order = {path: n for n, path in enumerate(traits)}
    calls = [n for n in program.nodes if n.kind == "module" and n.target in traits and _plain_call(n)]
    found = Match(program, lanes, [], {}, {})
    for node in calls:
        if node.args[0].dynamic:
            found.refused[node.target] = ("data-dependent", "values decide which rows it is given")
    live = _live(program)
    calls = [n for n in calls if not n.args[0].dynamic and n in live]
    taken: set[str] = set()
    single_round = _first_rounds(calls, found)
    for group in _groups(single_round, traits, _containers(owner, list(traits))):
        depth = schedule.depths(group)
        layers: dict[int, list[Node]] = defaultdict(list)
        for node in group:
            layers[depth[node]].append(node)
        for level in sorted(layers):
            nodes = sorted(layers[level], key=lambda n: order[n.target])
            paths = [n.target for n in nodes]
            if len(nodes) == 1 and not allowed(paths):
                if len(group) > 1:
                    found.refused[paths[0]] = ("chain", "it needs the result of another of its kind")
                continue
            if _seed(found, nodes, traits):
                taken.update(paths)
    rest = [n for n in single_round if n.target not in taken]
    for group in _wide_groups(rest, traits):
        group.sort(key=lambda n: order[n.target])
        if len(group) > 1 and schedule.merge(group):
            _widen(found, group, traits)
            taken.update(n.target for n in group)
    lanes.grow()
    found.replaced.update(Joins(lanes).replaced)
    for path in taken:
        found.refused.pop(path, None)
    return found


def _live(program: Program) -> set[Node]:
    """The operations whose results are used: by what is returned, or by something with an effect."""
    live = set(nodes_in(program.result))
    for node in reversed(program.nodes):
        if node in live or node.writes or node.random:
            live.add(node)
            live.update(node.operands())
    return live


def _plain_call(node: Node) -> bool:
    return len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], Node)


def _first_rounds(calls: Sequence[Node], found: Match) -> list[Node]:
    """Each Linear's first call; later calls on the same input are the same result, others stay heads."""
    first: dict[str, Node] = {}
    written = found.lanes.written
    for node in calls:
        earlier = first.setdefault(node.target, node)
        if earlier is node or earlier.args[0] is not node.args[0]:
            continue
        storages = {t.untyped_storage()._cdata for t in (earlier.value, node.value, node.args[0].value)}
        if not storages & written:
            found.replaced[node] = earlier
            found.lanes.users[earlier] = [*found.lanes.users[earlier], *found.lanes.users[node]]
    return list(first.values())


def _groups(calls: Sequence[Node], traits: dict[str, Traits], containers: dict[str, str]) -> list[list[Node]]:
    """Calls that one LinearList could hold: equal in all sizes, also of the input."""
    groups: dict[Any, list[Node]] = defaultdict(list)
    for node in calls:
        shape = tuple(node.args[0].value.shape)
        out = node.value.shape[_channel(traits[node.target])]
        groups[traits[node.target], out, shape].append(node)
    return [part for group in groups.values() for part in _by_container(group, containers)]


def _by_container(group: list[Node], containers: dict[str, str]) -> list[list[Node]]:
    """Lists that stand in a module by their own name keep it: they are not mixed with others."""
    parts: dict[str, list[Node]] = defaultdict(list)
    for node in group:
        parts[containers.get(node.target, "")].append(node)
    named = [part for name, part in parts.items() if name and len(part) > 1]
    rest = [node for name, part in parts.items() if not name or len(part) == 1 for node in part]
    return [*named, rest] if rest else named


def _containers(owner: nn.Module, paths: Sequence[str]) -> dict[str, str]:
    """For each Linear that stands directly in a ModuleList of some module's, the path of that list."""
    lists = {path for path, module in owner.named_modules() if type(module) is nn.ModuleList}
    found = {}
    for path in paths:
        parent = path.rpartition(".")[0]
        if parent in lists and parent.rpartition(".")[0] not in lists:
            found[path] = parent
    return found


def _wide_groups(calls: Sequence[Node], traits: dict[str, Traits]) -> list[list[Node]]:
    groups: dict[Any, list[Node]] = defaultdict(list)
    for node in calls:
        if traits[node.target].spatial == 0:
            groups[node.args[0], traits[node.target]].append(node)
    return list(groups.values())


def _channel(traits: Traits) -> int:
    return -1 - traits.spatial


def _seed(found: Match, nodes: list[Node], traits: dict[str, Traits]) -> bool:
    first = traits[nodes[0].target]
    position = len(found.fusions)

    def emit(stacked: Node | None, shared: Node | None, new: list[Node]) -> Node:
        source = shared if stacked is None else stacked
        assert source is not None
        if first.spatial:
            source = call(torch.Tensor.movedim, source, _channel(first), -1)
            new.append(source)
        if stacked is None:
            source = call(torch.Tensor.unsqueeze, source, -2)
        else:
            source = call(torch.Tensor.movedim, source, 0, -2)
        new.append(source)
        return Node("fused", position, (source,))

    pack = found.lanes.seed(nodes, emit)
    if pack is None:
        return False
    if first.spatial:
        moved = call(torch.Tensor.movedim, pack.stacked, -1, _channel(first))
        found.lanes.emitted[found.lanes.schedule.unit[nodes[0].index]].append(moved)
        pack.stacked, pack.linear = moved, False
    out = nodes[0].value.shape[_channel(first)]
    paths = tuple(n.target for n in nodes)
    found.fusions.append(Fusion("linear_list", paths, first, (out,) * len(nodes)))
    return True


def _widen(found: Match, nodes: list[Node], traits: dict[str, Traits]) -> None:
    """Linears of different sizes on one input: their rows one after another, and the result in pieces."""
    sizes = tuple(n.value.shape[-1] for n in nodes)
    fused = Node("fused", len(found.fusions), (nodes[0].args[0],))
    pieces = call(torch.split_with_sizes_copy, fused, sizes, -1)
    new = [fused, pieces]
    for n, node in enumerate(nodes):
        piece = call(operator.getitem, pieces, n)
        new.append(piece)
        found.replaced[node] = piece
    found.lanes.emitted[found.lanes.schedule.unit[nodes[0].index]] = new
    paths = tuple(n.target for n in nodes)
    found.fusions.append(Fusion("wide_linear", paths, traits[nodes[0].target], sizes))
