"""The converter's plain data: what a plan holds, the reasons for leaving a Linear alone, and the errors."""

from dataclasses import dataclass, field
from typing import NamedTuple


class ConversionError(RuntimeError):
    """A model or optimizer that cannot be looked at or converted at all; it is as it was."""


class ParamRef(NamedTuple):
    """Where an original parameter lives in the converted model.

    It is ``new[index]`` (an int), the rows ``new[start:stop]`` (a pair) or all of ``new`` (None), reshaped to
    ``shape``; ``new`` is the tensor called ``name``.
    """

    name: str
    index: int | tuple[int, int] | None  # type: ignore[assignment]  # hides tuple.index
    shape: tuple[int, ...]


# Each code's hint: what the user can do. docs/converting.md says more about each.
HINTS = {
    "chain": "each needs the result of the one before; a chain has no parallel form",
    "data-dependent": "routing by values needs a grouped matmul; compute the choice outside, or mask results",
    "tied": "untie them first if they need not stay equal, or call the shared layer once on the whole tensor",
    "hooked": "remove the hooks before converting, and attach them to the new layer",
    "parametrized": "remove the parametrization first (torch.nn.utils.parametrize.remove_parametrizations)",
    "subclass": "only exactly nn.Linear is known to compute x W^T + b; copy its weights into one if it does",
    "lazy": "run the model once on example inputs, so that its shapes are known, then convert",
    "mixed-dtype": "give the items of the list one dtype",
    "mixed-device": "move the items of the list to one device",
    "frozen-subset": "freeze all items of the list, or none; or convert first and freeze by a gradient mask",
    "unregistered": "keep it in an nn.ModuleList, so that parameters() and state_dict() see it",
    "unused": "the example inputs never reach it; pass inputs that do",
    "functional-use": "call the module instead of passing its weight to F.linear",
    "not-nn-linear": "only exactly nn.Linear is converted",
    "call-site-not-traced": "put the loop into a method that takes tensors and lists of modules",
    "single": "one dense Linear; a MonarchRule could approximate it",
    "ragged": "its inputs have another shape than its neighbours'; pad them to one shape",
    "repeated": "the same Linear is called on several inputs; stack the inputs and call it once",
    "excluded": "named by exclude=, or not named by include=",
    "no-gain": "the fused form was not faster by the factor asked for",
    "tolerance": "raise the tolerance, or leave the layer dense",
}


@dataclass(frozen=True)
class Rewrite:
    """Some Linears that become one layer.

    Attributes:
        rule: "linear_list" or "wide_linear".
        owner: path of the module whose function calls them.
        call_site: the function, file and line, "deal_list, model.py:88".
        replaces: paths of the original Linears (or 1x1 convolutions), in the order of the stack.
        into: path of the new layer.
        guards: the conditions of the fast path, as Python expressions; elsewhere the original code runs.
        in_features, out_features: of the Linears; out_features of each, in the order of `replaces`.
        bias: whether they have one.
        spatial: 0 for nn.Linear, else the spatial dimensions of the 1x1 convolutions replaced.
        notes: what the user should know, such as dropout that draws other random numbers now.
    """

    rule: str
    owner: str
    call_site: str
    replaces: tuple[str, ...]
    into: str
    guards: tuple[str, ...]
    in_features: int
    out_features: tuple[int, ...]
    bias: bool
    spatial: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skip:
    """A Linear that is left alone: its path, a reason code, the reason in words and what the user can do."""

    path: str
    code: str
    reason: str
    hint: str


@dataclass(frozen=True)
class Patch:
    """One function of one module instance: its fast paths, each behind guards, before the original code.

    Attributes:
        owner: path of the module.
        function: name of the method.
        source: a Python function with the method's own signature, which ends in the original method; the
            default of a parameter p is called `_default_p`.
        constants: (name, module, qualified name) of each class or function that the source refers to.
    """

    owner: str
    function: str
    source: str = field(repr=False)
    constants: tuple[tuple[str, str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Plan:
    """What `convert_model` would do: decided on a copy of the model, as plain data.

    Attributes:
        matches: the rewrites.
        skips: every Linear that stays, with its reason.
        patches: the functions that change, as source text.
    """

    matches: tuple[Rewrite, ...]
    skips: tuple[Skip, ...]
    patches: tuple[Patch, ...] = field(repr=False)

    def __str__(self) -> str:
        from ._table import plan_table

        return plan_table(self)


def skip(path: str, code: str, reason: str, hint: str | None = None) -> Skip:
    """Make a Skip with the code's own hint."""
    return Skip(path, code, reason, hint or HINTS[code])
