"""Close packs: where all lanes meet again, one operation on the stack takes the place of N."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ._lanes import Lanes, Pack, call, range_or_list, tainted, take
from ._program import Node, nodes_in

_CATS = {torch.cat, torch.concat, torch.concatenate}


class Joins:
    """What replaces the operations that read all lanes of a pack.

    Attributes:
        replaced: for each such operation, the one whose result stands for its own.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.replaced: dict[Node, Node] = {}
        in_result = set(nodes_in(lanes.program.result))
        for node in lanes.program.nodes:
            if node in lanes.pack_of or node in self.replaced:
                continue
            if node.kind == "call" and (node.target is torch.stack or node.target in _CATS):
                self._join(node)
            elif node.target is operator.setitem:
                self._write(node)
            elif node.target in (operator.add, operator.iadd):
                self._sum(node, in_result)

    def _lanes_of(self, nodes: Sequence[object]) -> tuple[Pack, list[int]] | None:
        """The pack and lanes of some values, if they all come from one."""
        found = [self.lanes.pack_of.get(node) for node in nodes if isinstance(node, Node)]
        if len(found) != len(nodes) or not found or any(f is None for f in found):
            return None
        packs = {f[0] for f in found if f is not None}
        if len(packs) > 1 or any(tainted(node, self.lanes.written) for node in nodes):  # type: ignore[arg-type]
            return None
        return packs.pop(), [f[1] for f in found if f is not None]

    def _replace(self, nodes: Sequence[Node], new: list[Node]) -> None:
        unit = self.lanes.schedule.unit[nodes[0].index]
        self.lanes.emitted[unit] = new
        for node in nodes:
            self.replaced[node] = new[-1]

    def _join(self, node: Node) -> None:
        """stack or cat of lanes: move the lanes to where they belong."""
        parts = node.args[0] if node.args else None
        if not isinstance(parts, (list, tuple)) or "out" in node.kwargs:
            return
        found = self._lanes_of(parts)
        dim = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else 0))
        if found is None or type(dim) is not int:
            return
        pack, which = found
        rank = pack.ndim
        new: list[Node] = []
        value = take(pack.stacked, 0, which, len(pack.nodes), new)
        dim %= rank + 1 if node.target is torch.stack else rank
        if dim or node.target is not torch.stack:
            value = call(torch.Tensor.movedim, value, 0, dim)
            new.append(value)
        if node.target is not torch.stack:
            value = call(torch.Tensor.flatten, value, dim, dim + 1)
            new.append(value)
        # The result is the caller's to change in place; a Linear's own result nobody else keeps.
        alone = pack.linear and all(user is node for n in pack.nodes for user in self.lanes.users[n])
        if alone:
            value = call(torch.Tensor.contiguous, value)
        else:
            value = call(torch.clone, value, memory_format=torch.contiguous_format)
        new.append(value)
        self._replace([node], new)

    def _write(self, first: Node) -> None:
        """Writes of every lane into its own part of one tensor: one write."""
        target, _, lane = first.args
        if not isinstance(target, Node) or lane not in self.lanes.pack_of:
            return
        pack = self.lanes.pack_of[lane][0]
        writes = []
        for n in pack.nodes:
            mine = [
                u
                for u in self.lanes.users[n]
                if u.target is operator.setitem and u.args[0] is target and u.args[2] is n
            ]
            if len(mine) != 1:
                return
            writes += mine
        indices = [w.args[1] if isinstance(w.args[1], tuple) else (w.args[1],) for w in writes]
        index = indices[0]
        differing = [p for p in range(len(index)) if any(i[p] != index[p] for i in indices)]
        plain = all(
            len(i) == len(index) and all(p is Ellipsis or type(p) in (int, slice) for p in i) for i in indices
        )
        if not plain or len(differing) != 1 or any(nodes_in(index)) or self._lanes_of(pack.nodes) is None:
            return
        at = differing[0]
        given = [i[at] for i in indices]
        if any(type(part) is not int or part < 0 for part in given) or len(set(given)) < len(given):
            return
        order = sorted(range(len(given)), key=given.__getitem__)
        where = range_or_list([given[k] for k in order])
        dims = target.value.ndim - sum(part is not Ellipsis for part in index)
        kept = sum(dims if part is Ellipsis else type(part) is not int for part in index[:at])
        rank = target.value.ndim - sum(type(part) is int for part in index)
        if not isinstance(where, slice) or rank != pack.ndim or not self.lanes.schedule.merge(writes):
            return
        new: list[Node] = []
        view = call(operator.getitem, target, (*index[:at], where, *index[at + 1 :]))
        moved = call(torch.Tensor.movedim, view, kept, 0)
        new += [view, moved]
        value = take(pack.stacked, 0, order, len(order), new)
        new.append(call(torch.Tensor.copy_, moved, value))
        new[-1].writes = first.writes
        self._replace(writes, new)

    def _sum(self, first: Node, in_result: set[Node]) -> None:
        """A running sum over all lanes: one sum over the stack, added to what it started from."""
        start, lane = first.args if len(first.args) == 2 else (None, None)
        if lane not in self.lanes.pack_of or start in self.lanes.pack_of:
            start, lane = lane, start
        if not isinstance(lane, Node) or lane not in self.lanes.pack_of or start in self.lanes.pack_of:
            return
        if first.target is operator.iadd and first.args[0] is lane:
            return
        pack = self.lanes.pack_of[lane][0]
        if isinstance(start, Node) and (not isinstance(start.value, Tensor) or start.value.ndim > pack.ndim):
            return
        chain, seen = [first], {self.lanes.pack_of[lane][1]}
        while len(seen) < len(pack.nodes):
            users = self.lanes.users[chain[-1]]
            if len(users) != 1 or chain[-1] in in_result or users[0].target is not first.target:
                return
            follower = users[0]
            other = [a for a in follower.args if a is not chain[-1]]
            if len(other) != 1 or other[0] not in self.lanes.pack_of:
                return
            found, n = self.lanes.pack_of[other[0]]
            if found is not pack or n in seen or follower.args[0] is not chain[-1]:
                return
            seen.add(n)
            chain.append(follower)
        if len(chain) < 2 or self._lanes_of(pack.nodes) is None or not self.lanes.schedule.merge(chain):
            return
        total = call(torch.Tensor.sum, pack.stacked, 0)
        node = call(first.target, *((start, total) if first.args[0] is start else (total, start)))
        node.writes = first.writes
        self._replace(chain, [total, node])
