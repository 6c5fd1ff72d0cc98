"""Which parameter of the original is which part of the converted model's, and which Linears became one layer.

Everything follows from `param_map`, `{old name: (new name, index, shape)}`: `new[index]` for an int, rows
`new[start:stop]` for a pair, the whole tensor for None; then reshaped. Names that it lacks are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Reference = tuple[str, "int | tuple[int, int] | None", tuple[int, ...]]


@dataclass(frozen=True)
class Group:
    """Old tensors that are compared in one go: `old[k]` is `new[index[k]]`; or one old tensor alone.

    `shape`: of each old tensor; `where`: for one alone, the part of the new tensor that it is.
    """

    label: str
    old: tuple[str, ...]
    new: str
    shape: tuple[int, ...]
    index: tuple[int, ...] | None = None
    where: tuple[int, int] | None = None

    def take_old(self, values: MappingType[str, Tensor | None]) -> Tensor | None:
        """The old tensors as one, stacked where the group has an index; None where none of them is there."""
        found = [values.get(name) for name in self.old]
        present = [t for t in found if t is not None]
        if not present:
            return None
        if self.index is None:
            return present[0]
        return torch.stack([torch.zeros_like(present[0]) if t is None else t for t in found])

    def take_new(self, values: MappingType[str, Tensor | None]) -> Tensor | None:
        """The same part of the converted model's tensors, in the old shape (stacked as `take_old` does)."""
        tensor = values.get(self.new)
        if tensor is None:
            return None
        if self.index is not None:
            whole = self.index == tuple(range(tensor.shape[0]))
            return (tensor if whole else tensor[list(self.index)]).reshape(len(self.index), *self.shape)
        return (tensor if self.where is None else tensor[slice(*self.where)]).reshape(self.shape)


@dataclass(frozen=True)
class Site:
    """Linears of the original that one layer of the converted model stands for.

    `linears[k]` is number `index[k]` of the layer at `path`. `stacked`: its weight is (N, O, I); otherwise
    the Linears are rows of one wide weight and share their input.
    """

    path: str
    linears: tuple[str, ...]
    index: tuple[int, ...]
    stacked: bool
    out_features: int
    in_features: int
    bias: bool


class Mapping:
    """`param_map`, checked against both models and grouped."""

    def __init__(
        self, original: nn.Module, converted: nn.Module, param_map: MappingType[str, Any] | None
    ) -> None:
        self._map: dict[str, Reference] = {k: _reference(k, v) for k, v in (param_map or {}).items()}
        old = _named(original)
        new = _named(converted)
        unknown = [k for k in self._map if k not in old]
        if unknown:
            raise ValueError(f"verify: param_map names {unknown[0]!r}, which the original does not have")
        for name, (target, _, _) in self._map.items():
            if target not in new:
                raise ValueError(
                    f"verify: param_map maps {name!r} to {target!r}, which the converted model does not have"
                )
        self.lost = [name for name in old if name not in self._map and name not in new]
        used = {target for target, _, _ in self._map.values()}
        self.added = [name for name in new if name not in used and name not in old]
        self.groups = self._grouped({name: t for name, t in old.items() if name not in self.lost})
        self._group_of = {name: (group, k) for group in self.groups for k, name in enumerate(group.old)}
        self.sites = self._find_sites(original)

    def stack(self, values: MappingType[str, Tensor | None], names: list[str]) -> Tensor | None:
        """The converted model's tensors for the original's `names`, stacked; None where one is missing."""
        found = [self._group_of[name] for name in names]
        group = found[0][0]
        if group.index is not None and all(other is group for other, _ in found):
            taken, rows = group.take_new(values), [k for _, k in found]
            if taken is None or rows == list(range(taken.shape[0])):
                return taken
            return taken[rows]
        singles = [group.take_new(values) for group, _ in found]
        present = [t for t in singles if t is not None]
        return torch.stack(present) if len(present) == len(singles) else None

    def _grouped(self, tensors: dict[str, Tensor]) -> list[Group]:
        stacks: dict[tuple[str, tuple[int, ...]], list[tuple[int, str]]] = {}
        single: list[Group] = []
        for name, tensor in tensors.items():
            target, where, shape = self._map.get(name, (name, None, tuple(tensor.shape)))
            if isinstance(where, int):
                stacks.setdefault((target, shape), []).append((where, name))
            else:
                single.append(Group(name, (name,), target, shape, where=where))
        groups = []
        for (target, shape), members in stacks.items():
            members.sort()
            old = tuple(name for _, name in members)
            groups.append(Group(_common_label(old), old, target, shape, tuple(i for i, _ in members)))
        return groups + single

    def _find_sites(self, original: nn.Module) -> list[Site]:
        modules = dict(original.named_modules(remove_duplicate=False))
        found: dict[str, list[tuple[int, int, str]]] = {}
        for name, (target, where, _) in self._map.items():
            owner, _, leaf = name.rpartition(".")
            if leaf != "weight" or type(modules.get(owner)) is not nn.Linear or where is None:
                continue
            path, _, new_leaf = target.rpartition(".")
            if new_leaf == "weight":
                start, stop = where if isinstance(where, tuple) else (where, -1)
                found.setdefault(path, []).append((start, stop, owner))
        sites = []
        for path, members in found.items():
            members.sort()
            linears = [modules[owner] for _, _, owner in members]
            shapes = {(m.out_features, m.in_features, m.bias is not None) for m in linears}
            stacked = all(stop == -1 for _, stop, _ in members)
            if len(shapes) != 1 or not (stacked or all(stop != -1 for _, stop, _ in members)):
                continue  # unequal Linears in one wide layer: judged as the tensors they are
            out_features, in_features, bias = shapes.pop()
            index = [start if stacked else start // out_features for start, _, _ in members]
            owners = tuple(owner for _, _, owner in members)
            sites.append(Site(path, owners, tuple(index), stacked, out_features, in_features, bias))
        return sites


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _reference(name: str, value: Any) -> Reference:
    ok = isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str)
    if not ok or not (value[1] is None or isinstance(value[1], (int, tuple))):
        wanted = "(new name, index or (start, stop) or None, shape)"
        raise TypeError(f"verify: param_map[{name!r}] must be {wanted}, got {value!r}")
    return value[0], value[1], tuple(value[2])


def _common_label(names: tuple[str, ...]) -> str:
    """`mu.0.weight`, `mu.1.weight` -> `mu.*.weight`."""
    parts = [name.split(".") for name in names]
    if len({len(p) for p in parts}) != 1:
        return f"{names[0]} … {names[-1]}"
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*parts, strict=True))
