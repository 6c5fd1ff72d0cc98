"""Carry out a plan on a model: build the fused layers, put them in place, give owners their new methods."""

import functools
import importlib
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._linear_list import LinearList
from ._heads import FusedLinear, bind_heads
from ._types import ParamRef, Patch, Plan, Rewrite


def install(model: nn.Module, plan: Plan) -> dict[str, ParamRef]:
    """Change the model as planned; return where each original parameter is now.

    Everything that can fail is done before the first change.
    """
    modules = dict(model.named_modules())
    layers = [build_layer([modules[path] for path in r.replaces], r) for r in plan.matches]
    paths = _all_paths(model)
    param_map: dict[str, ParamRef] = {}
    for rewrite in plan.matches:
        param_map.update(_references(rewrite, modules, paths))
    classes: dict[str, Any] = {
        owner: converted_class(
            type(modules[owner]),  # type: ignore[arg-type]  # a class is hashable
            tuple(p for p in plan.patches if p.owner == owner),
            tuple(_relative(param_map, owner).items()),
        )
        for owner in dict.fromkeys(p.owner for p in plan.patches)
    }
    for rewrite, layer in zip(plan.matches, layers, strict=True):
        place(model, rewrite, layer, modules)
    for owner, kind in classes.items():
        modules[owner].__class__ = kind
    return param_map


def build_layer(originals: list[Any], rewrite: Rewrite) -> nn.Module:
    """The fused layer with copies of the originals' parameters."""
    first = originals[0]
    bias = rewrite.bias
    layer: nn.Module
    if rewrite.rule == "linear_list":
        layer = LinearList(
            rewrite.in_features, rewrite.out_features[0], len(originals), bias=bias, device="meta"
        )
        weight = torch.stack([m.weight.detach().flatten(1) for m in originals])
        biases = torch.stack([m.bias.detach() for m in originals]) if bias else None
    else:
        layer = nn.Linear(rewrite.in_features, sum(rewrite.out_features), bias=bias, device="meta")
        weight = torch.cat([m.weight.detach() for m in originals])
        biases = torch.cat([m.bias.detach() for m in originals]) if bias else None
    layer.weight = nn.Parameter(weight, requires_grad=first.weight.requires_grad)
    if biases is not None:
        layer.bias = nn.Parameter(biases, requires_grad=first.bias.requires_grad)
    return layer.train(first.training)


def keeps_path(rewrite: Rewrite, model: nn.Module) -> bool:
    """Tell whether a LinearList stands where the whole ModuleList stood."""
    module = _get(model, rewrite.into)
    return (
        type(module) is nn.ModuleList
        and tuple(f"{rewrite.into}.{n}" for n in range(len(module))) == rewrite.replaces
    )


def _get(model: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = model
    for part in path.split(".") if path else ():
        module = None if module is None else module._modules.get(part)
    return module


def place(model: nn.Module, rewrite: Rewrite, layer: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Put a fused layer in, and heads where the Linears stood; other references to them follow."""
    if keeps_path(rewrite, model):
        replace_everywhere(model, {id(modules[rewrite.into]): layer})
        return
    holder_path, _, position = rewrite.into.rpartition(".")
    parent, _, name = holder_path.rpartition(".")
    holder = modules[parent]._modules.get(name)
    if holder is None:
        holder = nn.ModuleList()
        modules[parent].add_module(name, holder)
    holder.add_module(position, layer)
    heads: dict[int, nn.Module] = {}
    for path, part in zip(rewrite.replaces, parts(rewrite), strict=True):
        heads[id(modules[path])] = FusedLinear(layer, part, rewrite.spatial).train(modules[path].training)
    replace_everywhere(model, heads)


def parts(rewrite: Rewrite) -> list[Any]:
    """Which part of the fused layer each Linear is: its number, or its rows."""
    if rewrite.rule == "linear_list":
        return list(range(len(rewrite.replaces)))
    ends = [sum(rewrite.out_features[: n + 1]) for n in range(len(rewrite.replaces))]
    return [(end - size, end) for end, size in zip(ends, rewrite.out_features, strict=True)]


def replace_everywhere(model: nn.Module, new: dict[int, nn.Module]) -> None:
    """Replace modules wherever a module of the model holds them: registered, or in a plain container."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in new:
                module._modules[name] = new[id(child)]
        for name, value in list(vars(module).items()):
            if name not in ("_modules", "_parameters", "_buffers", "_layer"):
                changed = _replace_in(value, new)
                if changed is not value:
                    object.__setattr__(module, name, changed)


def _replace_in(value: Any, new: dict[int, nn.Module]) -> Any:
    if isinstance(value, nn.Module):
        return new.get(id(value), value)
    if type(value) is list:
        value[:] = [_replace_in(item, new) for item in value]
    elif type(value) is dict:
        for key in value:
            value[key] = _replace_in(value[key], new)
    elif type(value) is tuple and any(_replace_in(item, new) is not item for item in value):
        return tuple(_replace_in(item, new) for item in value)
    return value


# Where parameters are now.


def _all_paths(model: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), []).append(path)
    return found


def _references(
    rewrite: Rewrite, modules: dict[str, nn.Module], paths: dict[int, list[str]]
) -> dict[str, ParamRef]:
    at_path = rewrite.into in modules
    found = {}
    for path, part in zip(rewrite.replaces, parts(rewrite), strict=True):
        for alias in paths[id(modules[path])]:
            into = alias.rpartition(".")[0] if at_path else rewrite.into
            for name, tensor in modules[path].named_parameters():
                found[f"{alias}.{name}"] = ParamRef(f"{into}.{name}", part, tuple(tensor.shape))
    return found


def _relative(param_map: dict[str, ParamRef], owner: str) -> dict[str, ParamRef]:
    """The references within an owner, by their names from there."""
    lead = f"{owner}." if owner else ""
    return {
        old.removeprefix(lead): ParamRef(ref.name.removeprefix(lead), ref.index, ref.shape)
        for old, ref in param_map.items()
        if old.startswith(lead) and ref.name.startswith(lead)
    }


# The owner's class.


@functools.cache
def converted_class(
    base: type, patches: tuple[Patch, ...], references: tuple[tuple[str, ParamRef], ...]
) -> type:
    """A subclass of an owner's class for one instance: its new methods, and old checkpoint keys understood.

    The methods belong to the class, so a copy, a replica or an unpickled instance runs on its own weights.
    """
    members: dict[str, Any] = {patch.function: _compile(base, patch) for patch in patches}

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        own: Any = base.__reduce_ex__  # for the state: object.__getstate__ is new in Python 3.11
        return rebuild, (base, patches, references), *own(self, protocol)[2:]

    def load(self: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        stack_old_keys(state_dict, prefix, dict(references))
        base._load_from_state_dict(self, state_dict, prefix, *rest)  # type: ignore[attr-defined]

    def replicate(self: nn.Module) -> nn.Module:
        replica = base._replicate_for_data_parallel(self)  # type: ignore[attr-defined]
        replica._forward_pre_hooks = replica._forward_pre_hooks.copy()
        replica.register_forward_pre_hook(functools.partial(bind_heads, self), prepend=True)
        return replica

    members |= {"__reduce_ex__": reduce, "_load_from_state_dict": load, "__module__": base.__module__}
    members["_replicate_for_data_parallel"] = replicate
    members["__doc__"] = base.__doc__
    kind: Any = type(base.__name__, (base,), members)
    kind.__qualname__ = base.__qualname__
    kind._fastlayers_base = base
    return kind


def rebuild(base: type, patches: tuple[Patch, ...], references: tuple[tuple[str, ParamRef], ...]) -> Any:
    """Make an empty instance of a converted class, for copy and pickle."""
    kind: Any = converted_class(base, patches, references)
    return kind.__new__(kind)


def original_class(module: nn.Module) -> type:
    """The class a module had before it was converted."""
    return getattr(type(module), "_fastlayers_base", type(module))


def _compile(base: type, patch: Patch) -> Callable[..., Any]:
    names: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "operator": operator,
        "_original": getattr(base, patch.function),
    }
    for name, module, qualified in patch.constants:
        found: Any = importlib.import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
        names[name] = found
    for name, parameter in inspect.signature(names["_original"]).parameters.items():
        names[f"_default_{name}"] = parameter.default
    file = f"<fastlayers: {base.__qualname__}.{patch.function}>"
    exec(compile(patch.source, file, "exec"), names)
    function = names[patch.function]
    return function


# Old keys.


def stack_old_keys(state_dict: dict[str, Any], prefix: str, references: dict[str, ParamRef]) -> None:
    """Replace the original's keys by the fused layers', where all of a layer's are there."""
    groups: dict[str, list[tuple[str, ParamRef]]] = {}
    for old, ref in references.items():
        groups.setdefault(ref.name, []).append((old, ref))
    for new, members in groups.items():
        keys = [prefix + old for old, _ in members]
        if prefix + new in state_dict or not all(key in state_dict for key in keys):
            continue
        tensors = [state_dict[key] for key in keys]
        if any(tuple(t.shape) != ref.shape for t, (_, ref) in zip(tensors, members, strict=True)):
            continue  # torch reports the keys as missing and unexpected
        state_dict[prefix + new] = join(tensors, [ref for _, ref in members])
        for key in keys:
            del state_dict[key]


def join(tensors: list[Tensor], references: list[ParamRef]) -> Tensor:
    """Put originals together as the fused tensor they are parts of."""
    name = references[0].name
    dims = 1 if name.endswith("bias") else 2
    flat = [t.reshape(t.shape[:dims]) for t in tensors]
    if isinstance(references[0].index, int):
        order = sorted(range(len(flat)), key=lambda n: references[n].index)  # type: ignore[arg-type, return-value]
        return torch.stack([flat[n] for n in order])
    order = sorted(range(len(flat)), key=lambda n: references[n].index[0])  # type: ignore[index]
    return torch.cat([flat[n] for n in order])


def part_of(tensor: Tensor, ref: ParamRef) -> Tensor:
    """Take an original parameter out of the fused tensor."""
    if isinstance(ref.index, tuple):
        tensor = tensor[slice(*ref.index)]
    elif ref.index is not None:
        tensor = tensor[ref.index]
    return tensor.reshape(ref.shape)
