"""Survey: which Linears a model has, which of them could be stacked, and why the others cannot."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ._types import ConversionError, Skip, skip

MODULE_FIELDS = frozenset(vars(nn.Module()))
_CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


@dataclass(frozen=True)
class Traits:
    """What two Linears must have in common to be held in one stack, apart from out_features."""

    in_features: int
    bias: bool
    dtype: torch.dtype
    device: str
    requires_grad: tuple[bool, ...]
    spatial: int  # 0 for nn.Linear, else the spatial dimensions of a 1x1 convolution


@dataclass
class Survey:
    """The Linears of a model by path.

    Attributes:
        candidates: plain nn.Linear and 1x1 convolutions that nothing forbids to stack.
        skips: all other Linears and look-alikes, with their reason.
        containers: ids of the modules that hold a candidate, directly or deeper.
    """

    candidates: dict[str, nn.Module] = field(default_factory=dict)
    traits: dict[str, Traits] = field(default_factory=dict)
    skips: dict[str, Skip] = field(default_factory=dict)

    def holders(self, model: nn.Module) -> dict[int, str]:
        """Ids of all modules on the way to a candidate, with a path of each."""
        modules = dict(model.named_modules())
        found: dict[int, str] = {id(model): ""}
        for path in self.candidates:
            while path:
                path = path.rpartition(".")[0]
                module = modules[path]
                if id(module) in found:
                    break
                found[id(module)] = path
        return found


def survey(model: nn.Module) -> Survey:
    """Look at every module once. Raise ConversionError where the whole model is out of reach."""
    _refuse_wrappers(model)
    places = Counter(id(child) for m in model.modules() for child in m._modules.values() if child is not None)
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    result = Survey()
    for path, module in model.named_modules():
        features = _features(module)
        if features is None:
            reason = _look_alike(module)
            if reason is not None:
                result.skips[path] = reason_at(path, reason)
            continue
        reason = _forbidden(module, places[id(module)], owners)
        if reason is None:
            result.candidates[path] = module
            result.traits[path] = _traits(module)
        elif isinstance(module, nn.Linear):
            result.skips[path] = reason_at(path, reason)
    for path, module in unregistered(model):
        if isinstance(module, nn.Linear):
            result.skips[path] = skip(path, "unregistered", "kept where no nn.Module registers it")
    return result


def reason_at(path: str, reason: tuple[str, str]) -> Skip:
    return skip(path, *reason)


def unregistered(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that stand in plain lists, tuples or dicts of a module, and are registered nowhere."""
    registered = {id(m) for m in model.modules()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in MODULE_FIELDS or not isinstance(value, (list, tuple, dict)):
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if isinstance(item, nn.Module) and id(item) not in registered:
                    for inner, part in item.named_modules(prefix=f"{name}.{key}"):
                        yield f"{path}.{inner}" if path else inner, part


def _refuse_wrappers(model: nn.Module) -> None:
    for path, module in model.named_modules():
        where = f"module {path!r}" if path else "the model"
        kind = type(module).__name__
        if kind == "OptimizedModule":
            raise ConversionError(f"{where} is compiled: convert the original, then compile the result")
        if kind in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel") or any(
            base.__name__ == "FSDPModule" for base in type(module).__mro__
        ):
            raise ConversionError(
                f"{where} is wrapped in {kind}: convert the bare model, then wrap the result"
            )
        for name, parameter in module._parameters.items():
            if parameter is not None and type(parameter).__name__ == "DTensor":
                raise ConversionError(f"{where} has the sharded parameter {name!r}: convert before sharding")


def _features(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of anything derived from nn.Linear and of 1x1 convolutions, else None."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module) in _CONVOLUTIONS:
        conv: Any = module
        pointwise = all(k == 1 for k in conv.kernel_size) and all(s == 1 for s in conv.stride)
        if pointwise and conv.groups == 1 and conv.padding in ((0,) * len(conv.kernel_size), "valid", "same"):
            return conv.in_channels, conv.out_channels
    return None


def _look_alike(module: nn.Module) -> tuple[str, str] | None:
    name = type(module).__name__
    weight = module._parameters.get("weight")
    if "Linear" not in name or weight is None or type(module).__module__.startswith("fastlayers."):
        return None
    return "not-nn-linear", f"{type(module).__module__}.{name}"


def _forbidden(module: nn.Module, places: int, owners: Counter[int]) -> tuple[str, str] | None:
    """The reason code and its words if this Linear must not be stacked, else None."""
    kind = type(module)
    own = set(module._parameters) | set(module._buffers) | set(module._modules)
    if "parametrizations" in module._modules or own & {"weight_g", "weight_orig", "weight_u"}:
        return "parametrized", "its weight is computed from other tensors"
    if isinstance(module, nn.LazyLinear) or any(
        isinstance(p, nn.parameter.UninitializedParameter) for p in module._parameters.values()
    ):
        return "lazy", "its in_features are not known before the first run"
    if kind is not nn.Linear and kind not in _CONVOLUTIONS:
        return "subclass", f"{kind.__module__}.{kind.__qualname__} may compute something else"
    parameters = [p for p in module._parameters.values() if p is not None]
    hooks = [name for name, value in vars(module).items() if name.endswith("_hooks") and value]
    hooks += [f"{name} hook" for name, p in module._parameters.items() if p is not None and p._backward_hooks]
    if hooks:
        return "hooked", f"has {', '.join(sorted(hooks))}"
    if "forward" in vars(module) or own != {"weight", "bias"}:
        return "subclass", "has a forward or tensors of its own"
    if any(type(p) is not nn.Parameter for p in parameters):
        return "subclass", f"its weight is a {type(module._parameters['weight']).__name__}"
    if places > 1:
        return "tied", f"the same module stands in {places} places"
    if any(owners[id(p)] > 1 for p in parameters):
        return "tied", "shares a parameter with another module"
    return None


def _traits(module: Any) -> Traits:
    parameters = [p for p in (module.weight, module.bias) if p is not None]
    return Traits(
        in_features=module.weight.shape[1],
        bias=module.bias is not None,
        dtype=module.weight.dtype,
        device=str(module.weight.device),
        requires_grad=tuple(p.requires_grad for p in parameters),
        spatial=_CONVOLUTIONS.get(type(module), 0),
    )
