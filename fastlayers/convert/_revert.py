"""Give a converted model its original structure back, with the weights it has now."""

from typing import Any

from torch import nn

from ._heads import FusedLinear
from ._install import original_class, part_of, parts, replace_everywhere
from ._types import ParamRef, Plan, Rewrite

_CONVOLUTIONS: tuple[Any, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def revert_model(model: nn.Module, plan: Plan) -> nn.Module:
    """Undo a plan on a model, in place, and return the model."""
    modules = dict(model.named_modules())
    for rewrite in plan.matches:
        _put_back(model, modules, rewrite)
    for rewrite in plan.matches:
        holder_path, _, position = rewrite.into.rpartition(".")
        parent, _, name = holder_path.rpartition(".")
        holder = modules[parent]._modules.get(name) if rewrite.into + ".0" not in rewrite.replaces else None
        if holder is not None and position in holder._modules:
            del holder._modules[position]
            if not holder._modules:
                del modules[parent]._modules[name]
    for patch in plan.patches:
        modules[patch.owner].__class__ = original_class(modules[patch.owner])
    return model


def _put_back(model: nn.Module, modules: dict[str, nn.Module], rewrite: Rewrite) -> None:
    layer: Any = modules[rewrite.into]
    linears = [
        _original(layer, rewrite, part, out)
        for part, out in zip(parts(rewrite), rewrite.out_features, strict=True)
    ]
    if rewrite.into + ".0" in rewrite.replaces:
        replace_everywhere(model, {id(layer): nn.ModuleList(linears).train(layer.training)})
        return
    heads = [modules[path] for path in rewrite.replaces]
    assert all(isinstance(head, FusedLinear) for head in heads)
    for head, linear in zip(heads, linears, strict=True):
        linear.train(head.training)
    replace_everywhere(model, {id(head): linear for head, linear in zip(heads, linears, strict=True)})


def _original(layer: Any, rewrite: Rewrite, part: Any, out_features: int) -> nn.Module:
    kind = _CONVOLUTIONS[rewrite.spatial]
    size = (1,) if rewrite.spatial else ()
    linear = kind(rewrite.in_features, out_features, *size, bias=rewrite.bias, device="meta")
    for name, tensor in layer.named_parameters(recurse=False):
        shape = tuple(linear.get_parameter(name).shape)
        old = part_of(tensor.detach(), ParamRef(name, part, shape)).clone()
        setattr(linear, name, nn.Parameter(old, requires_grad=tensor.requires_grad))
    return linear.train(layer.training)
