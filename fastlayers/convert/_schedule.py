"""The order of a program's operations: what must come before what, and which may be merged into one."""

import heapq
from collections.abc import Iterable, Sequence

from ._program import Node, Program, storages


class Schedule:
    """Operations and the order they must keep, some of them merged.

    An operation comes after those it reads, after earlier writes to the memory it reads or writes, and before
    later ones; random draws keep their order. Merging some operations is right exactly when the merged graph
    still has an order: when none of them leads to another.
    """

    def __init__(self, program: Program) -> None:
        self.nodes = program.nodes
        self.before: list[set[int]] = _dependences(program.nodes)
        self.unit = list(range(len(self.nodes)))
        self.members: dict[int, list[int]] = {i: [i] for i in self.unit}

    def depths(self, group: Sequence[Node]) -> dict[Node, int]:
        """For each of some operations, how many others of them stand one after another before it."""
        chosen = {node.index for node in group}
        depth = [0] * len(self.nodes)
        for i, before in enumerate(self.before):
            depth[i] = max((depth[j] + (j in chosen) for j in before), default=0)
        return {node: depth[node.index] for node in group}

    def merge(self, nodes: Sequence[Node]) -> bool:
        """Merge operations into one, if an order remains; tell whether it does."""
        units = sorted({self.unit[node.index] for node in nodes})
        if len(units) == 1:
            return True
        saved = {u: self.members[u] for u in units}
        self._join(units[0], units)
        if self.order() is not None:
            return True
        for u, members in saved.items():
            self.members[u] = members
            for i in members:
                self.unit[i] = u
        return False

    def _join(self, target: int, units: Iterable[int]) -> None:
        members = sorted(i for u in units for i in self.members[u])
        for u in units:
            self.members.pop(u)
        self.members[target] = members
        for i in members:
            self.unit[i] = target

    def order(self) -> list[int] | None:
        """The units, earliest first and otherwise as the program ran; None if some wait for each other."""
        waits: dict[int, int] = {}
        after: dict[int, list[int]] = {u: [] for u in self.members}
        for u, members in self.members.items():
            before = {self.unit[j] for i in members for j in self.before[i]}
            before.discard(u)
            waits[u] = len(before)
            for v in before:
                after[v].append(u)
        ready = [u for u, count in waits.items() if count == 0]
        heapq.heapify(ready)
        result = []
        while ready:
            u = heapq.heappop(ready)
            result.append(u)
            for v in after[u]:
                waits[v] -= 1
                if waits[v] == 0:
                    heapq.heappush(ready, v)
        return result if len(result) == len(self.members) else None


def _dependences(nodes: Sequence[Node]) -> list[set[int]]:
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    last_random = -1
    result = []
    for i, node in enumerate(nodes):
        before = {operand.index for operand in node.operands()}
        reads = {s for operand in node.operands() for s in storages(operand.value)}
        for storage in reads | node.writes:
            if storage in writer:
                before.add(writer[storage])
        for storage in node.writes:
            before.update(readers.get(storage, ()))
            writer[storage], readers[storage] = i, []
        for storage in reads - node.writes:
            readers.setdefault(storage, []).append(i)
        if node.random:
            if last_random >= 0:
                before.add(last_random)
            last_random = i
        before.discard(i)
        result.append(before)
    return result
