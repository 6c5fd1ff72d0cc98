"""MonarchRule: dense Linears, named by the user, that become Monarch layers with a known error."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._monarch_linear import MonarchLinear
from .._monarch_ops import GROUPINGS, check_dims
from .._projection import Projection, project
from .._projection_search import Choice, estimated_gain, search
from ._copying import copy_model
from ._monarch_budget import Wish, spread
from ._observe import copy_tensors, observe, run_example
from ._select import select
from ._survey import Survey, survey
from ._types import ConversionError, Rewrite, Skip, skip

_MOST_PARAMETERS = 0.8  # of the dense layer's: with more, nothing is gained


@dataclass(frozen=True)
class MonarchRule:
    """Which dense Linears may be approximated by Monarch layers, and how closely.

    Attributes:
        include, exclude: paths ("mlp" names all below it), globs or "re:" patterns of Linears.
        params: share of the dense parameters that all these layers together may keep; ranks are spread over
            them by the error that each saves.
        weight_tolerance, output_tolerance: relative error (Frobenius; root mean square over the calibration
            inputs) that each layer may have. With ``params``, a layer must keep both.
        calibration: an iterable of inputs of the model, each a tuple of positional or a dict of keyword
            arguments, or a tensor. They stream through the model once. Layers then reproduce their outputs.
        in_dims, out_dims, rank: of every layer; without the dims each searches its own, plain low rank
            among them.
        grouping: "strided", "contiguous", or None for the better.
        min_gain: a layer whose estimated speed at its batch size is not this much better stays dense. The
            estimate is for the CPU; 0 converts regardless.
    """

    include: str | Iterable[str]
    exclude: str | Iterable[str] | None = None
    _: KW_ONLY
    params: float | None = None
    weight_tolerance: float | None = None
    output_tolerance: float | None = None
    calibration: Iterable[Any] | None = None
    in_dims: Sequence[int] | None = None
    out_dims: Sequence[int] | None = None
    rank: int | None = None
    grouping: str | None = None
    min_gain: float = 1.2


@dataclass(frozen=True)
class Approximation:
    """One layer that was replaced: what was asked of it and what it lost."""

    path: str
    projection: Projection
    weight_tolerance: float | None
    output_tolerance: float | None
    estimated_gain: float

    @property
    def passed(self) -> bool:
        """Tell whether the errors are within the tolerances."""
        wanted = (
            (self.projection.weight_error, self.weight_tolerance),
            (self.projection.output_error, self.output_tolerance),
        )
        return all(most is None or (error is not None and error <= most) for error, most in wanted)

    def __str__(self) -> str:
        return f"{self.path}: {self.projection}"


@dataclass(frozen=True)
class Decision:
    """What becomes of the named Linears: layers ready to be put in, and the reasons for those that stay."""

    layers: dict[str, MonarchLinear]
    approximations: tuple[Approximation, ...]
    rewrites: tuple[Rewrite, ...]
    skips: tuple[Skip, ...]


@dataclass
class _Seen:
    """What the calibration showed of one Linear."""

    gram: Tensor | None = None
    tokens: int = 0  # of all calls
    most_tokens: int = 0  # of one call


def check_rule(rule: MonarchRule) -> None:
    """Raise ValueError for a rule that says nothing, or contradicts itself."""
    sizes = (rule.params, rule.weight_tolerance, rule.output_tolerance, rule.rank, rule.in_dims)
    if all(value is None for value in sizes):
        raise ValueError(
            "MonarchRule: say how small or how exact: params, weight_tolerance, output_tolerance, rank or"
            " the dims"
        )
    if rule.weight_tolerance is not None and rule.output_tolerance is not None:
        raise ValueError("MonarchRule: give weight_tolerance or output_tolerance, not both")
    if rule.rank is not None and any(value is not None for value in sizes[:3]):
        raise ValueError("MonarchRule: rank sets what params and the tolerances would: give one of them")
    if rule.output_tolerance is not None and rule.calibration is None:
        raise ValueError("MonarchRule: output_tolerance needs calibration inputs")
    for name in ("params", "weight_tolerance", "output_tolerance", "rank"):
        value = getattr(rule, name)
        if value is not None and value <= 0:
            raise ValueError(f"MonarchRule: {name} must be positive, got {value!r}")
    if rule.params is not None and rule.params >= 1:
        raise ValueError(f"MonarchRule: params is a share of the dense parameters, got {rule.params!r}")
    if (rule.in_dims is None) != (rule.out_dims is None):
        raise ValueError("MonarchRule: give in_dims and out_dims, or neither")
    if rule.in_dims is not None and rule.out_dims is not None:
        check_dims("MonarchRule", rule.in_dims, rule.out_dims)
    if rule.grouping is not None and rule.grouping not in GROUPINGS:
        raise ValueError(
            f'MonarchRule: grouping must be "strided", "contiguous" or None, got {rule.grouping!r}'
        )


def decide(model: nn.Module, example_inputs: Any, rules: Sequence[MonarchRule]) -> Decision:
    """Project the Linears that the rules name; the model itself is looked at on a copy and not changed.

    A Linear that several rules name follows the first.
    """
    for rule in rules:
        check_rule(rule)
    looked_at = copy_model(model).eval()
    found = survey(looked_at)
    _refuse_readers(looked_at, found)
    linears: dict[str, nn.Module] = {
        path: module for path, module in found.candidates.items() if type(module) is nn.Linear
    }
    known = [*linears, *(path for path in found.skips if path not in linears)]
    example = _watch(looked_at, [example_inputs], linears, with_gram=False)
    with torch.random.fork_rng():
        sites = observe(looked_at, example_inputs, linears).sites if linears else {}
    result = Decision({}, (), (), ())
    taken: set[str] = set()
    for rule in rules:
        named = select(known, rule.include, "include") or set()
        named -= select(known, rule.exclude, "exclude") or set()
        mine = [path for path in known if path in named and path not in taken]
        taken |= set(mine)
        result = _join(result, _apply(rule, looked_at, mine, linears, found, example, sites))
    return result


def _apply(
    rule: MonarchRule,
    model: nn.Module,
    paths: list[str],
    linears: Mapping[str, nn.Module],
    found: Survey,
    example: Mapping[str, _Seen],
    sites: Mapping[str, str],
) -> Decision:
    skips = [found.skips[path] for path in paths if path not in linears]
    wanted: dict[str, Any] = {path: linears[path] for path in paths if path in linears}
    seen = example
    if rule.calibration is not None:
        seen = _watch(model, rule.calibration, wanted, with_gram=True)
    wishes: list[Wish] = []
    for path, linear in list(wanted.items()):
        if seen[path].tokens == 0 or example[path].tokens == 0:
            skips.append(skip(path, "unused", "the inputs never call it"))
        else:
            wishes.append(Wish(path, linear.weight.detach(), seen[path].gram))
    layers: dict[str, MonarchLinear] = {}
    approximations: list[Approximation] = []
    budget = _budget(rule, wishes)
    for wish in wishes:
        outcome = _one(rule, wanted[wish.path], wish, budget.get(wish.path), example[wish.path].most_tokens)
        if isinstance(outcome, Skip):
            skips.append(outcome)
        else:
            layers[wish.path], approximation = outcome
            approximations.append(approximation)
    rewrites = tuple(
        monarch_rewrite(a.path, wanted[a.path], sites.get(a.path, ""), f"approximation: {a}")
        for a in approximations
    )
    return Decision(layers, tuple(approximations), rewrites, tuple(skips))


def _budget(rule: MonarchRule, wishes: list[Wish]) -> dict[str, Choice]:
    """The sizes of every layer under a budget for all of them."""
    if rule.params is None:
        return {}
    return spread(wishes, rule.params, _dims(rule), _groupings(rule))


def _one(
    rule: MonarchRule, linear: nn.Linear, wish: Wish, budgeted: Choice | None, tokens: int
) -> tuple[MonarchLinear, Approximation] | Skip:
    """One layer, or why it stays dense."""
    dense = linear.weight.numel()
    tolerance = rule.weight_tolerance if rule.weight_tolerance is not None else rule.output_tolerance
    gram = wish.gram if rule.weight_tolerance is None else None
    if rule.params is not None and budgeted is None:
        return skip(wish.path, "no-gain", f"no Monarch layer keeps {rule.params:.1%} of its parameters")
    if tolerance is not None:
        choices = search(wish.weight, gram, _dims(rule), _groupings(rule), tolerance=tolerance)
        most = _MOST_PARAMETERS * dense if budgeted is None else float(budgeted.parameters)
        # The data-aware fit does better than the estimate that chose: try with what the limit allows, too.
        within = [c for c in choices if c.parameters <= most]
        limited = search(wish.weight, gram, _dims(rule), _groupings(rule), most_parameters=most)
        within += sorted(limited, key=lambda c: c.error)[:1]
    else:
        within = [budgeted] if budgeted is not None else []
        if budgeted is None:
            within = search(wish.weight, gram, _dims(rule), _groupings(rule), rank=rule.rank)[:1]
        most = _MOST_PARAMETERS * dense
    best: MonarchLinear | None = None
    for choice in dict.fromkeys((within[0], within[-1])) if within else ():
        layer = _project(rule, linear, wish, choice, tolerance)
        error = _error(rule, layer)
        if best is None or error < _error(rule, best):
            best = layer
        if tolerance is None or (error <= tolerance and layer.projection.parameters_after <= most):  # type: ignore[union-attr]
            best = layer
            break
    if best is None or best.projection is None:
        return skip(wish.path, "no-gain", "no Monarch layer has fewer parameters")
    record = best.projection
    if tolerance is not None and (_error(rule, best) > tolerance or record.parameters_after > most):
        return skip(
            wish.path,
            "tolerance",
            f"best error {_error(rule, best):.4f} with {record.parameters_after / dense:.1%} of its"
            f" parameters, asked {tolerance:g} with at most {most / dense:.1%}",
        )
    chosen = Choice(record.in_dims, record.out_dims, record.rank, record.grouping, _error(rule, best))
    gain = estimated_gain(chosen, linear.in_features, linear.out_features, tokens)
    if gain < rule.min_gain:
        return skip(
            wish.path,
            "no-gain",
            f"estimated {gain:.2f} times as fast at {tokens} tokens, with error {_error(rule, best):.4f}"
            f" and {record.parameters_after / dense:.1%} of its parameters",
            "lower min_gain, run larger batches, or leave it dense",
        )
    return best, Approximation(wish.path, record, rule.weight_tolerance, rule.output_tolerance, gain)


def _project(
    rule: MonarchRule, linear: nn.Linear, wish: Wish, choice: Choice, tolerance: float | None
) -> MonarchLinear:
    """Project, at the choice's rank; under an output tolerance at the least rank that keeps it."""
    searching = rule.output_tolerance is not None and choice.error <= (tolerance or 0.0)
    return project(
        linear,
        in_dims=choice.in_dims,
        out_dims=choice.out_dims,
        rank=None if searching else choice.rank,
        output_tolerance=rule.output_tolerance if searching else None,
        gram=wish.gram,
        weight_only=rule.weight_tolerance is not None,
        grouping=choice.grouping,
    )


def _error(rule: MonarchRule, layer: MonarchLinear) -> float:
    """The error that counts: of the output where there was calibration and no tolerance on the weight."""
    record = layer.projection
    assert record is not None
    if rule.weight_tolerance is not None or record.output_error is None:
        return record.weight_error
    return record.output_error


def _dims(rule: MonarchRule) -> tuple[Sequence[int], Sequence[int]] | None:
    if rule.in_dims is None or rule.out_dims is None:
        return None
    return tuple(rule.in_dims), tuple(rule.out_dims)


def _groupings(rule: MonarchRule) -> tuple[str, ...]:
    return GROUPINGS if rule.grouping is None else (rule.grouping,)


def _watch(
    model: nn.Module, batches: Iterable[Any], linears: Mapping[str, nn.Module], with_gram: bool
) -> dict[str, _Seen]:
    """Run the model on every batch and take down the Gram matrix of what each Linear gets, in one pass."""
    seen = {path: _Seen() for path in linears}

    def watcher(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].detach().reshape(-1, args[0].shape[-1])
            entry = seen[path]
            entry.tokens += x.shape[0]
            entry.most_tokens = max(entry.most_tokens, x.shape[0])
            if with_gram and x.shape[0] > 0:
                wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
                part = wide.T @ wide.conj()
                entry.gram = part if entry.gram is None else entry.gram + part

        return hook

    handles = [linear.register_forward_pre_hook(watcher(path)) for path, linear in linears.items()]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            for batch in batches:
                run_example(model, copy_tensors((batch,) if isinstance(batch, Tensor) else batch))
    except Exception as error:
        raise ConversionError(f"the model fails on the inputs: {type(error).__name__}: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    for entry in seen.values():
        if entry.gram is not None:
            entry.gram /= entry.tokens
    return seen


def _refuse_readers(model: nn.Module, found: Survey) -> None:
    """Linears whose weight their owner reads itself, so that a replaced layer would not be asked."""
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            name = f"{path}.out_proj" if path else "out_proj"
            words = "nn.MultiheadAttention reads its weight and never calls it"
            found.candidates.pop(name, None)
            found.skips[name] = skip(name, "functional-use", words, "none: leave it dense")


def monarch_rewrite(path: str, linear: nn.Linear, site: str, note: str) -> Rewrite:
    """The record of one Linear that became a Monarch layer at its own path."""
    return Rewrite(
        rule="monarch_linear",
        owner=path.rpartition(".")[0],
        call_site=site,
        replaces=(path,),
        into=path,
        guards=(),
        in_features=linear.in_features,
        out_features=(linear.out_features,),
        bias=linear.bias is not None,
        notes=(note,),
    )


def _join(a: Decision, b: Decision) -> Decision:
    return Decision(
        {**a.layers, **b.layers},
        a.approximations + b.approximations,
        a.rewrites + b.rewrites,
        a.skips + b.skips,
    )
