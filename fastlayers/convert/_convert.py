"""convert_model: plan on a copy, change a copy, verify it, and only then hand it out."""

import copy
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn, optim

from ._checkpoint import (
    convert_state_dict,
    load_file,
    param_map_from_json,
    param_map_to_json,
    restore_state_dict,
    save_file,
)
from ._copying import copy_model
from ._install import install
from ._measure import Measurement, measure
from ._monarch import MonarchRule
from ._optimizer import OriginalParameters, convert_optimizer, restore_optimizer
from ._plan import check_inputs, make_plan
from ._revert import revert_model
from ._types import ConversionError, ParamRef, Plan, Rewrite, Skip

EXACT_RULES = ("linear_list", "wide_linear")


def plan(
    model: nn.Module,
    example_inputs: Any,
    *,
    rules: Sequence[Any] = EXACT_RULES,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> Plan:
    """Say what `convert_model` would do, and change nothing: the model is looked at on a copy.

    Args:
        model: any ``nn.Module``; not compiled, not wrapped for data parallelism.
        example_inputs: a tuple of positional or a dict of keyword arguments that the model is called with.
            The model runs on them; other sizes work afterwards where the code does not depend on them.
        rules: what may be rewritten; by default what computes the same.
        include, exclude: paths ("mu" names all below it), globs or "re:" patterns of Linears.

    Raises:
        TypeError: example_inputs is neither tuple nor dict.
        ValueError: a pattern that matches nothing.
        ConversionError: a model that cannot be copied or looked at, or fails on the inputs.
    """
    exact, monarch = _split_rules(rules)
    found = make_plan(model, example_inputs, include, exclude) if exact else None
    if not monarch:
        assert found is not None
        return found
    from ._monarch_convert import plan_with_monarch

    check_inputs(example_inputs)
    return plan_with_monarch(found, model, example_inputs, monarch)


def _split_rules(rules: Sequence[Any]) -> tuple[bool, list[MonarchRule]]:
    """Whether the exact rules are among the rules, and the Monarch rules."""
    monarch = [rule for rule in rules if isinstance(rule, MonarchRule)]
    exact = [rule for rule in rules if not isinstance(rule, MonarchRule)]
    unknown = [rule for rule in exact if rule not in EXACT_RULES]
    if unknown or not rules:
        raise ValueError(f"rules must be of EXACT_RULES, or a MonarchRule, got {unknown!r}")
    if exact and set(exact) != set(EXACT_RULES):
        raise ValueError("rules must hold all of EXACT_RULES; leave Linears out by exclude=")
    return bool(exact), monarch


class Conversion:
    """A converted model and what was done to it.

    Attributes:
        model: the converted model.
        rewrites: what was rewritten.
        skips: every Linear left alone, with its reason.
        report: the verifier's report, or None where it was not asked for.
        param_map: for each original parameter that moved, where it is now.
        measurement: what `measure` found, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        param_map: dict[str, ParamRef],
        report: Any,
        keys: Sequence[str],
        originals: OriginalParameters,
    ) -> None:
        self.model, self.plan, self.param_map, self.report = model, plan, param_map, report
        self._old_keys, self._originals = tuple(keys), originals
        self.measurement: Measurement | None = None

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        return self.plan.matches

    @property
    def skips(self) -> tuple[Skip, ...]:
        return self.plan.skips

    def convert_state_dict(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn a state dict of the original model into one of the converted model, bit for bit."""
        return convert_state_dict(state_dict, self.param_map, self.model.state_dict())

    def restore_state_dict(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn a state dict of the converted model into one of the original model, bit for bit."""
        return restore_state_dict(state_dict, self.param_map, self._old_keys)

    def convert_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Let an optimizer of the original model train the converted one, in place, as if never converted.

        Param groups keep their hyperparameters, schedulers and hooks stay attached, and state and pending
        gradients are stacked; weights are not touched. Everything is checked before the first change.

        Args:
            optimizer: exactly one of torch.optim's Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam,
                RAdam, RMSprop, Rprop or SGD, with any setting; it holds the original model's parameters.

        Raises:
            TypeError: no torch.optim.Optimizer.
            ConversionError: an optimizer of another kind, which may keep statistics of whole tensors
                (Adafactor, Muon, LBFGS, LAMB, …); parameters that are not the original model's; parts of one
                fused tensor in different param groups, with different step counts or with different state.
        """
        convert_optimizer(optimizer, self.model, self.param_map, self._originals)

    def restore_optimizer(self, optimizer: optim.Optimizer, model: nn.Module) -> None:
        """Let an optimizer of the converted model train ``model``, in place: the way back.

        Args:
            optimizer: as for `convert_optimizer`; it holds parameters of the converted model.
            model: of the original structure, as `revert` gives it.

        Raises:
            TypeError, ConversionError: as `convert_optimizer`; and a model of another structure.
        """
        restore_optimizer(optimizer, self.model, self.param_map, model)

    def measure(self, original: nn.Module, example_inputs: Any, *, seconds: float = 1.0) -> Measurement:
        """Time the original against the converted model; the table shows the times from then on.

        Args:
            original: the model that was converted (its copy, where it was converted in place).
            example_inputs: as for `convert_model`.
            seconds: about how long each thing is run.
        """
        self.measurement = measure(original, self.model, self.rewrites, example_inputs, seconds)
        return self.measurement

    def revert(self) -> nn.Module:
        """Give a model of the original structure with the present weights; ``self.model`` is untouched."""
        return revert_model(copy.deepcopy(self.model), self.plan)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the converted weights and what was done as one safetensors file, whole or not at all."""
        facts = {
            "param_map": param_map_to_json(self.param_map),
            "keys": list(self._old_keys),
            "rewrites": [[r.rule, list(r.replaces), r.into] for r in self.rewrites],
        }
        save_file(path, self.model.state_dict(), facts)

    def to_json(self) -> str:
        """Everything that was done and found, as JSON."""
        report = None if self.report is None else json.loads(self.report.to_json())
        return json.dumps(
            {
                "rewrites": [asdict(r) for r in self.rewrites],
                "skips": [asdict(s) for s in self.skips],
                "param_map": param_map_to_json(self.param_map),
                "report": report,
                "times": None if self.measurement is None else asdict(self.measurement),
            },
            indent=2,
        )

    def __str__(self) -> str:
        from ._table import conversion_table

        return conversion_table(self)


def convert_model(
    model: nn.Module,
    example_inputs: Any,
    *,
    plan: Plan | None = None,
    rules: Sequence[Any] = EXACT_RULES,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    inplace: bool = False,
    verify: bool = True,
) -> Conversion:
    """Fuse the small Linears of a model, carry their weights over, and prove that it computes the same.

    Args:
        model, example_inputs, rules, include, exclude: as for `plan`.
        plan: one made before by `plan`, for this model.
        inplace: change ``model`` itself; by default a copy is changed and ``model`` stays as it is.
        verify: compare the result with the original by `fastlayers.verify`, on the example inputs.

    Returns:
        A `Conversion`; its ``model`` loads the original's checkpoints too.

    Raises:
        EquivalenceError: the result is not as accurate as the original; the model is as it was.
        TypeError, ValueError, ConversionError: as `plan`; and a plan made for another model.
    """
    check_inputs(example_inputs)
    with_exact, monarch = _split_rules(rules)
    if monarch:
        from ._monarch_convert import convert_with_monarch

        base = None
        if with_exact:
            base = convert_model(
                model, example_inputs, plan=plan, include=include, exclude=exclude, verify=verify
            )
        return convert_with_monarch(model, example_inputs, base, monarch, inplace)
    if plan is not None and any(match.rule == "monarch_linear" for match in plan.matches):
        raise ConversionError("the plan holds approximations, which are fitted anew: pass its rules instead")
    if plan is None:
        decided = globals()["plan"](model, example_inputs, rules=rules, include=include, exclude=exclude)
    else:
        decided = plan
        _check_plan(model, decided)
    keys, originals = list(model.state_dict()), OriginalParameters(model)
    report = None
    if verify or not inplace:
        converted = copy_model(model)
        param_map = install(converted, decided)
        if verify:
            from ..equivalence import verify as compare

            report = compare(model, converted, example_inputs, param_map=param_map)
            report.raise_if_failed()
    if inplace:
        param_map = install(model, decided)
        converted = model
    return Conversion(converted, decided, param_map, report, keys, originals)


def _check_plan(model: nn.Module, plan: Plan) -> None:
    modules = dict(model.named_modules())
    missing = [path for r in plan.matches for path in r.replaces if path not in modules]
    missing += [patch.owner for patch in plan.patches if patch.owner not in modules]
    if missing:
        raise ConversionError(f"the plan was made for another model: no {', '.join(missing[:5])} in this one")


def load_converted(
    model: nn.Module, example_inputs: Any, path: str | os.PathLike[str], *, verify: bool = False
) -> Conversion:
    """Convert a fresh model and load a file written by `Conversion.save`; the model itself is not changed.

    Raises:
        ConversionError: a file that is damaged, or belongs to another model or another conversion of it.
    """
    state, facts = load_file(path)
    if "monarch" in facts:
        from ._monarch_convert import load_with_monarch

        return load_with_monarch(model, example_inputs, path, state, facts)
    conversion = convert_model(model, example_inputs, verify=verify)
    if param_map_from_json(facts["param_map"]) != conversion.param_map:
        raise ConversionError(f"{path}: the file was converted differently from this model with these inputs")
    expected = conversion.model.state_dict()
    missing, unexpected = set(expected) - set(state), set(state) - set(expected)
    if missing or unexpected:
        raise ConversionError(f"{path}: missing {sorted(missing)[:8]}, unexpected {sorted(unexpected)[:8]}")
    conversion.model.load_state_dict(state)
    return conversion
