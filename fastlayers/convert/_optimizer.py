"""Optimizers follow a conversion, and back: parameters change hands with their state, after all checks."""

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn, optim

from ._checkpoint import _some
from ._install import join, part_of
from ._types import ConversionError, ParamRef

# What these do to an element of a parameter depends on that element's gradients and the step count alone, so
# a stack trains as its parts did. Exact types: a subclass may do anything.
_ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD,
    optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip


class OriginalParameters:
    """The names of a model's parameters by object; it keeps none alive, and is empty when unpickled."""

    def __init__(self, model: nn.Module | None = None) -> None:
        named = () if model is None else model.named_parameters()
        self._known = {id(p): (weakref.ref(p), name, n) for n, (name, p) in enumerate(named)}

    def find(self, parameter: nn.Parameter) -> tuple[str, int] | None:
        """The parameter's name and its position in the model, or None."""
        reference, name, position = self._known.get(id(parameter), (None, "", 0))
        return None if reference is None or reference() is not parameter else (name, position)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OriginalParameters":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return OriginalParameters, ()


@dataclass
class _Place:
    """One place in a param group: the parameter that stands there, as it is or as it will be."""

    name: str
    position: int  # in the model's own order
    parameter: nn.Parameter
    ref: ParamRef
    state: dict[str, Any] | None = None
    grad: Tensor | None = None


def convert_optimizer(
    optimizer: Any, model: nn.Module, param_map: Mapping[str, ParamRef], originals: OriginalParameters
) -> None:
    """Let an optimizer of the original's parameters train the converted model; see `Conversion`."""
    refuse = _Refusal("convert_optimizer", optimizer)
    new = dict(model.named_parameters(remove_duplicate=False))
    order = {id(p): (name, n) for n, (name, p) in enumerate(model.named_parameters())}
    groups = _held(optimizer, originals, param_map, order, refuse)
    _check_whole(groups, param_map, new, refuse)
    result = []
    for group in groups:
        by_target: dict[int, list[_Place]] = defaultdict(list)
        for place in group:
            by_target[id(new[place.ref.name])].append(place)
        places = []
        for members in by_target.values():
            ref = members[0].ref
            target = new[ref.name]
            place = _Place(*order[id(target)], target, ref)
            for member in members:
                _check_kin(member, target, refuse)
            if ref.index is None:
                _carry(optimizer, members[0], place)
            else:
                place.state, place.grad = _stacked(optimizer, members, target, refuse)
            places.append(place)
        result.append(_arranged(group, places))
    _commit(optimizer, result)


def restore_optimizer(
    optimizer: Any, model: nn.Module, param_map: Mapping[str, ParamRef], reverted: nn.Module
) -> None:
    """Let an optimizer of the converted model's parameters train a model of the original structure."""
    refuse = _Refusal("restore_optimizer", optimizer)
    fused = dict(model.named_parameters(remove_duplicate=False))
    order = {id(p): (name, n) for n, (name, p) in enumerate(model.named_parameters())}
    stacks = {ref.name for ref in param_map.values()}
    parts: dict[int, list[_Place]] = defaultdict(list)
    for n, (name, target) in enumerate(reverted.named_parameters()):
        ref = param_map.get(name, ParamRef(name, None, tuple(target.shape)))
        if name in stacks or ref.name not in fused or tuple(target.shape) != tuple(ref.shape):
            refuse(f"model must have the original's structure; {name} {tuple(target.shape)} is not of it")
        place = _Place(name, n, target, ref)
        _check_kin(place, fused[ref.name], refuse)
        parts[id(fused[ref.name])].append(place)
    groups, result = [], []
    for number, given in enumerate(optimizer.param_groups):
        if foreign := [_describe(number, n, p) for n, p in enumerate(given["params"]) if id(p) not in order]:
            refuse(f"all its parameters must be the converted model's; {_some(foreign)} not")
        group = [_Place(*order[id(p)], p, ParamRef("", None, ())) for p in given["params"]]
        if missing := [place.name for place in group if id(place.parameter) not in parts]:
            refuse(f"model must have the original's structure; nothing in it comes from {_some(missing)}")
        places = []
        for old in group:
            for place in parts[id(old.parameter)]:
                _split(optimizer, old, place, refuse)
                places.append(place)
        groups.append(group)
        result.append(_arranged(group, places))
    _commit(optimizer, result)


class _Refusal:
    """Raises ConversionError for one call; checks the optimizer's kind first."""

    def __init__(self, function: str, optimizer: Any) -> None:
        self.function = function
        if not isinstance(optimizer, optim.Optimizer):
            raise TypeError(
                f"{function}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        if type(optimizer) not in _ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
            self(
                f"optimizer must be exactly one of torch.optim's {names}, which treat each element alone; got"
                f" {type(optimizer).__module__}.{type(optimizer).__qualname__}, which may keep statistics of"
                " whole tensors, so that a stack would train differently from its parts. Make a new optimizer"
                " for the converted model instead"
            )

    def __call__(self, message: str) -> NoReturn:
        raise ConversionError(f"{self.function}: {message}")


def _held(
    optimizer: optim.Optimizer,
    originals: OriginalParameters,
    param_map: Mapping[str, ParamRef],
    order: Mapping[int, Any],
    refuse: _Refusal,
) -> list[list[_Place]]:
    """What each group holds, by the original's names."""
    groups, foreign, converted = [], [], 0
    for number, given in enumerate(optimizer.param_groups):
        group = []
        for n, parameter in enumerate(given["params"]):
            known = originals.find(parameter)
            if known is None:
                foreign.append(_describe(number, n, parameter))
                converted += id(parameter) in order
                continue
            ref = param_map.get(known[0], ParamRef(known[0], None, tuple(parameter.shape)))
            group.append(_Place(*known, parameter, ref))
        groups.append(group)
    if foreign:
        why = "; these are the converted model's already" if converted == len(foreign) else ""
        refuse(f"all its parameters must be the original model's; {_some(foreign)} not{why}")
    return groups


def _describe(group: int, n: int, parameter: Tensor) -> str:
    return f"param_groups[{group}]['params'][{n}] of shape {tuple(parameter.shape)}"


def _check_whole(
    groups: Sequence[Sequence[_Place]],
    param_map: Mapping[str, ParamRef],
    new: Mapping[str, nn.Parameter],
    refuse: _Refusal,
) -> None:
    """All parts of a fused tensor must be in one group, or all in none."""
    home = {(id(new[p.ref.name]), p.ref.index): (n, p.name) for n, group in enumerate(groups) for p in group}
    first = {key[0]: where for key, where in reversed(home.items())}
    for old, ref in param_map.items():
        key = (id(new[ref.name]), ref.index)
        if key[0] in first and home.get(key, (None,))[0] != first[key[0]][0]:
            number, name = first[key[0]]
            other = f"group {home[key][0]}" if key in home else "no group"
            refuse(
                f"the parts of {ref.name} must all be in one param group, got {name} in group {number} and"
                f" {old} in {other}; leave them out of the conversion by exclude=, or make a new optimizer"
            )


def _check_kin(part: _Place, other: Tensor, refuse: _Refusal) -> None:
    mine, theirs = part.parameter, other
    if (mine.dtype, mine.device) != (theirs.dtype, theirs.device):
        refuse(
            f"both models must have one dtype and device, got {mine.dtype} on {mine.device} for {part.name}"
            f" and {theirs.dtype} on {theirs.device} for {part.ref.name}; convert the optimizer before you"
            " move one of them"
        )


def _stacked(
    optimizer: optim.Optimizer, members: Sequence[_Place], target: nn.Parameter, refuse: _Refusal
) -> tuple[dict[str, Any] | None, Tensor | None]:
    """The state and gradient of a fused tensor from those of its parts."""
    states: list[dict[str, Any]] = [optimizer.state.get(m.parameter) or {} for m in members]
    references = [m.ref for m in members]
    first, name = members[0], members[0].ref.name
    must = f"the parts of {name} must have"
    for member, state in zip(members, states, strict=True):
        if state.keys() != states[0].keys():
            refuse(
                f"{must} the same state, got {_keys(states[0])} for {first.name} and {_keys(state)} for"
                f" {member.name}; they were not trained alike"
            )
    result: dict[str, Any] = {}
    for key in states[0]:
        values = [state[key] for state in states]
        if _per_element(values[0], first.parameter, key, first.name, refuse):
            result[key] = join([v.detach() for v in values], references)
            continue
        for member, value in zip(members, values, strict=True):
            if not _same(value, values[0]):
                refuse(
                    f"{must} one {key}, got {_number(values[0])} for {first.name} and {_number(value)} for"
                    f" {member.name}; they were not trained alike"
                )
        result[key] = values[0]
    grads = [m.parameter.grad for m in members]
    present = [g for g in grads if g is not None]
    if target.grad is not None or not present:
        return result or None, None
    if len(present) < len(grads):
        lacking = members[[g is None for g in grads].index(True)].name
        refuse(f"{must} gradients all or none, got none for {lacking}; call optimizer.zero_grad() first")
    return result or None, join(present, references)


def _carry(optimizer: optim.Optimizer, old: _Place, place: _Place) -> None:
    """Hand on the state and gradient of a parameter that no conversion touched."""
    place.state, grad = optimizer.state.get(old.parameter), old.parameter.grad
    place.grad = None if grad is None or place.parameter.grad is not None else grad.detach().clone()


def _keys(state: Mapping[str, Any]) -> str:
    return ", ".join(state) or "none"


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _per_element(value: Any, parameter: Tensor, key: str, name: str, refuse: _Refusal) -> bool:
    """Tell whether a piece of state has a number for each element; else it must be one number for all."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return False
    if value.shape != parameter.shape:
        refuse(
            f"state {key!r} of {name} must be one number or have its shape {tuple(parameter.shape)},"
            f" got {tuple(value.shape)}"
        )
    return True


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    return type(a) is type(b) and a == b


def _split(optimizer: optim.Optimizer, old: _Place, place: _Place, refuse: _Refusal) -> None:
    """Give an original parameter its part of a fused tensor's state and gradient."""
    if place.ref.index is None:
        _carry(optimizer, old, place)
        return
    state = optimizer.state.get(old.parameter)
    if old.parameter.grad is not None:
        place.grad = part_of(old.parameter.grad, place.ref).clone()
    if state is not None:
        place.state = {}
        for key, value in state.items():
            whole = _per_element(value, old.parameter, key, old.name, refuse)
            part = part_of(value.detach(), place.ref).clone() if whole else copy.deepcopy(value)
            place.state[key] = part


def _arranged(before: Iterable[_Place], places: list[_Place]) -> list[_Place]:
    """A group in its model's order stays in its model's order; any other in that of its members."""
    positions = [place.position for place in before]
    return sorted(places, key=lambda p: p.position) if positions == sorted(positions) else places


def _commit(optimizer: optim.Optimizer, groups: Sequence[Sequence[_Place]]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    for group, places in zip(optimizer.param_groups, groups, strict=True):
        group["params"][:] = [place.parameter for place in places]
        if "param_names" in group:
            group["param_names"] = [place.name for place in places]
        for place in places:
            if place.state is not None:
                optimizer.state[place.parameter] = place.state
            if place.parameter.grad is None and place.grad is not None:
                place.parameter.grad = place.grad
