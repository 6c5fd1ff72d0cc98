"""convert_model with a MonarchRule: exact rules first, then the named Linears approximated, and measured."""

import copy
import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils import _pytree

from .._monarch_linear import MonarchLinear
from ..equivalence import EquivalenceError
from ._checkpoint import param_map_to_json, save_file
from ._convert import Conversion, convert_model
from ._copying import copy_model
from ._install import replace_everywhere
from ._monarch import Approximation, Decision, decide, monarch_rewrite
from ._observe import copy_tensors, run_example
from ._types import ConversionError, ParamRef, Plan, Rewrite


@dataclass(frozen=True)
class ApproximationReport:
    """What was lost where: never an equivalence. Errors are relative, ||difference|| / ||original||.

    Attributes:
        comparisons: every approximated layer, with its record and its tolerance.
        outputs: the error of each output of the whole model on the example inputs, in eval mode.
        exact: `verify`'s report of what the exact rules did before, or None.
    """

    comparisons: tuple[Approximation, ...]
    outputs: tuple[tuple[str, float], ...]
    exact: Any = None

    @property
    def passed(self) -> bool:
        """Tell whether every layer is within its tolerance, and the exact part equivalent."""
        return all(c.passed for c in self.comparisons) and (self.exact is None or self.exact.passed)

    @property
    def worst(self) -> Approximation | None:
        """The layer with the largest error."""

        def error(a: Approximation) -> float:
            record = a.projection
            return record.weight_error if record.output_error is None else record.output_error

        return max(self.comparisons, key=error, default=None)

    def raise_if_failed(self) -> None:
        """Raise EquivalenceError, which carries this report, unless it passed."""
        if not self.passed:
            raise EquivalenceError(self)  # type: ignore[arg-type]

    def to_json(self) -> str:
        """Every number, as JSON."""
        return json.dumps(
            {
                "kind": "approximation",
                "passed": self.passed,
                "layers": [{**asdict(c), "passed": c.passed} for c in self.comparisons],
                "outputs": dict(self.outputs),
                "exact": None if self.exact is None else json.loads(self.exact.to_json()),
            },
            indent=2,
        )

    def to_html(self) -> str:
        """The same as one page."""
        rows = "".join(f"<li>{html.escape(line)}</li>" for line in str(self).split("\n"))
        exact = "" if self.exact is None else self.exact.to_html()
        return f"<h1>Approximated layers</h1><ul>{rows}</ul>{exact}"

    def __str__(self) -> str:
        head = f"approximated, {'within' if self.passed else 'NOT within'} the tolerances"
        if not any(c.weight_tolerance or c.output_tolerance for c in self.comparisons):
            head = "approximated, no tolerance asked for"
        if self.outputs:
            head += f" (model output error {max(e for _, e in self.outputs):.4f})"
        lines = [head, *map(str, self.comparisons)]
        lines += [f"output {name}: error {error:.4f}" for name, error in self.outputs]
        if self.exact is not None:
            lines.append(f"the exact rules: {str(self.exact).splitlines()[0]}")
        return "\n".join(lines)


class MonarchConversion(Conversion):
    """A conversion that holds approximations: it goes back to dense Linears, but not to the old weights."""

    _exact_plan: Plan

    def convert_state_dict(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Not possible: the weights of the approximated layers are no function of single old tensors."""
        raise ConversionError(
            "a Monarch layer's factors are fitted, not copied: load the weights into the original model and"
            " convert it again"
        )

    def restore_state_dict(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of the original structure; approximated layers give their dense matrix."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(state_dict)
        return dict(_revert(model, self.rewrites, self._exact_plan).state_dict())

    def convert_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Not possible: the factors are new parameters."""
        raise ConversionError(
            "a Monarch layer's factors are new parameters, with no state of the old ones: build the optimizer"
            " from the converted model's parameters"
        )

    def revert(self) -> nn.Module:
        """Give a model of the original structure; approximated layers become dense, as they compute now."""
        return _revert(copy.deepcopy(self.model), self.rewrites, self._exact_plan)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the converted weights and the sizes of the Monarch layers as one safetensors file."""
        facts = {
            "param_map": param_map_to_json(self.param_map),
            "keys": list(self._old_keys),
            "rewrites": [[r.rule, list(r.replaces), r.into] for r in self.rewrites],
            "monarch": {r.into: _sizes(self.model.get_submodule(r.into)) for r in _monarch_of(self.rewrites)},
            "exact": bool(self._exact_plan.matches),
        }
        save_file(path, self.model.state_dict(), facts)


def convert_with_monarch(
    model: nn.Module, example_inputs: Any, base: Conversion | None, rules: Sequence[Any], inplace: bool
) -> Conversion:
    """Approximate what the rules name, in a model or in what the exact rules made of a copy of it."""
    source = model if base is None else base.model
    decision = decide(source, example_inputs, rules)
    target = copy_model(source)
    _put_in(target, decision)
    outputs = _output_errors(source, target, example_inputs) if decision.layers else ()
    report = ApproximationReport(decision.approximations, outputs, None if base is None else base.report)
    report.raise_if_failed()
    result = _result(model, target, base, decision, report)
    if inplace:
        if base is not None:
            raise ConversionError("inplace: convert with the exact rules first, then with the MonarchRule")
        _put_in(model, replace(decision, layers={k: copy.deepcopy(v) for k, v in decision.layers.items()}))
        result.model = model
    return result


def plan_with_monarch(base: Plan | None, model: nn.Module, example_inputs: Any, rules: Sequence[Any]) -> Plan:
    """What `convert_with_monarch` would do, as a plan."""
    exact = Plan((), (), ()) if base is None else base
    return _joined(exact, decide(model, example_inputs, rules))


def load_with_monarch(
    model: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    state: Mapping[str, Tensor],
    facts: dict[str, Any],
) -> MonarchConversion:
    """Give a copy of a fresh model, or its exact conversion, the Monarch layers of a file and load it."""
    base = convert_model(model, example_inputs, verify=False) if facts["exact"] else None
    target = copy_model(model) if base is None else base.model
    rewrites = []
    for into, sizes in facts["monarch"].items():
        try:
            linear: Any = target.get_submodule(into)
        except AttributeError as error:
            raise ConversionError(f"{path}: belongs to another model: no {into} in this one") from error
        if type(linear) is not nn.Linear or linear.weight.shape != (
            sizes["out_features"],
            sizes["in_features"],
        ):
            raise ConversionError(f"{path}: belongs to another model: {into} is {linear}")
        weight = linear.weight
        layer = MonarchLinear(**sizes, device=weight.device, dtype=weight.dtype).train(linear.training)
        rewrites.append(monarch_rewrite(into, linear, "", "loaded from a file"))
        _replace(target, into, layer)
    try:
        target.load_state_dict(dict(state))
    except RuntimeError as error:
        raise ConversionError(f"{path}: {error}") from error
    decision = Decision({}, (), tuple(rewrites), ())
    return _result(model, target, base, decision, None)


def _sizes(layer: Any) -> dict[str, Any]:
    return {
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "in_dims": list(layer.in_dims),
        "out_dims": list(layer.out_dims),
        "bias": layer.bias is not None,
        "rank": layer.rank,
        "grouping": layer.grouping,
    }


def _result(
    model: nn.Module,
    target: nn.Module,
    base: Conversion | None,
    decision: Decision,
    report: ApproximationReport | None,
) -> MonarchConversion:
    exact = Plan((), (), ()) if base is None else base.plan
    param_map = {} if base is None else dict(base.param_map)
    for rewrite in decision.rewrites:
        if rewrite.bias:
            name = f"{rewrite.into}.bias"
            param_map[name] = ParamRef(name, None, rewrite.out_features)
    keys = list(model.state_dict())
    originals: Any = None if base is None else base._originals
    result = MonarchConversion(target, _joined(exact, decision), param_map, report, keys, originals)
    result._exact_plan = exact
    return result


def _joined(exact: Plan, decision: Decision) -> Plan:
    decided = {s.path for s in decision.skips} | {r.into for r in decision.rewrites}
    skips = tuple(s for s in exact.skips if s.path not in decided)
    return Plan(exact.matches + decision.rewrites, skips + decision.skips, exact.patches)


def _put_in(model: nn.Module, decision: Decision) -> None:
    for path, layer in decision.layers.items():
        _replace(model, path, layer)


def _replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    replace_everywhere(model, {id(model.get_submodule(path)): layer})
    owner = model.get_submodule(path.rpartition(".")[0])
    if isinstance(owner, nn.TransformerEncoderLayer):
        # Its fast path reads linear1.weight; without this mark it takes the other, which computes the same.
        owner.activation_relu_or_gelu = 0


def _monarch_of(rewrites: Sequence[Rewrite]) -> list[Rewrite]:
    return [r for r in rewrites if r.rule == "monarch_linear"]


def _revert(model: nn.Module, rewrites: Sequence[Rewrite], exact: Plan) -> nn.Module:
    from ._revert import revert_model

    for rewrite in _monarch_of(rewrites):
        layer = model.get_submodule(rewrite.into)
        assert isinstance(layer, MonarchLinear)
        replace_everywhere(model, {id(layer): layer.to_linear()})
    return revert_model(model, exact)


def _output_errors(
    original: nn.Module, converted: nn.Module, example_inputs: Any
) -> tuple[tuple[str, float], ...]:
    """Relative error of every floating-point tensor that the model gives, in eval mode, same random draws."""
    results = []
    for model in (original, converted):
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            results.append(run_example(copy_model(model).eval(), copy_tensors(example_inputs)))
    found = []
    before, after = (_pytree.tree_flatten_with_path(result)[0] for result in results)
    for (key, old), (_, new) in zip(before, after, strict=True):
        if isinstance(old, Tensor) and (old.is_floating_point() or old.is_complex()):
            scale = float(old.double().square().sum() if not old.is_complex() else old.abs().square().sum())
            lost = (new - old).abs().double().square().sum()
            found.append((_pytree.keystr(key), sqrt(float(lost) / scale) if scale > 0 else 0.0))
    return tuple(found)
