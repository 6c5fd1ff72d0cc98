"""Make a plan: look at a copy of the model, decide what becomes one layer, and write the new methods."""

import inspect
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ._codegen import Source, check_spelling, write
from ._copying import copy_model, without_collecting
from ._match import Fusion, Match, match
from ._observe import Function, Observation, copy_tensors, observe
from ._select import select
from ._survey import Survey, survey
from ._trace import Tracer, Untraceable, spell_path
from ._types import Patch, Plan, Rewrite, Skip, skip


@dataclass
class Followed:
    """One traced call of a function, and what of it can be fused; paths are from the function's owner."""

    function: Function
    match: Match


@dataclass
class Outcome:
    """All calls of one function, tried with the Linears that are still free."""

    function: Function
    calls: list[Followed]
    linears: set[str]
    layers: int


def make_plan(
    model: nn.Module,
    example_inputs: Any,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> Plan:
    """Decide on a copy of the model; see `fastlayers.plan`."""
    check_inputs(example_inputs)
    with without_collecting():
        twin = copy_model(model)
        known = survey(twin)
        _leave_out(known, include, exclude)
        if not known.candidates:
            return Plan((), tuple(known.skips.values()), ())
        seen = observe(twin, example_inputs, known.candidates)
        return _Planner(twin, known, seen).plan()


def check_inputs(example_inputs: Any) -> None:
    """Refuse what is neither a tuple of positional nor a dict of keyword arguments."""
    if isinstance(example_inputs, dict) and all(isinstance(key, str) for key in example_inputs):
        return
    if not isinstance(example_inputs, tuple):
        hint = "; put a single tensor into a tuple: (x,)" if hasattr(example_inputs, "shape") else ""
        raise TypeError(
            "example_inputs must be a tuple of positional arguments or a dict of keyword arguments,"
            f" got {type(example_inputs).__name__}{hint}"
        )


def _leave_out(known: Survey, include: Any, exclude: Any) -> None:
    paths = [*known.candidates, *known.skips]
    wanted, unwanted = select(paths, include, "include"), select(paths, exclude, "exclude")
    for path in list(known.candidates):
        named = wanted is None or path in wanted
        if not named or (unwanted is not None and path in unwanted):
            why = "named by exclude" if named else "not named by include"
            known.skips[path] = skip(path, "excluded", why)
            del known.candidates[path], known.traits[path]


class _Planner:
    def __init__(self, model: nn.Module, known: Survey, seen: Observation) -> None:
        self.model, self.known, self.seen = model, known, seen
        self.modules = dict(model.named_modules())
        self.reasons: dict[str, tuple[str, str]] = {}
        self.rewrites: list[Rewrite] = []
        self.names: set[str] = set()
        self.read: set[str] = set()
        self.tried: dict[Any, Outcome] = {}
        self.holders = known.holders(model)

    def plan(self) -> Plan:
        free = set(self.known.candidates)
        chosen: list[Outcome] = []
        while outcomes := self._outcomes(free):
            best = min(outcomes, key=lambda o: (-len(o.linears), o.layers, -o.function.depth))
            chosen.append(best)
            free -= best.linears
        into = {
            id(call): [self._rewrite(call, fusion) for fusion in call.match.fusions]
            for o in chosen
            for call in o.calls
        }
        patches = [patch for o in chosen for patch in self._patches(o, into)]
        return Plan(tuple(self.rewrites), tuple(self._skips()), tuple(patches))

    # Trying.

    def _outcomes(self, free: set[str]) -> list[Outcome]:
        """What each function could do, from the innermost outwards, where an outer one may do more.

        An outer function is followed only if inner ones leave some of its Linears, or do the same in several
        modules of one class, which it could do for all of them at once.
        """
        found: list[Outcome] = []
        for function in sorted(self.seen.functions.values(), key=lambda f: -f.depth):
            mine = free & set(function.linears)
            inner = [o for o in found if o.linears & mine]
            kinds = [(o.function.name, type(self.modules[o.function.owner])) for o in inner]
            left = mine - {path for o in inner for path in o.linears}
            if mine and (left or len(set(kinds)) < len(kinds)):
                outcome = self._try(function, free)
                if outcome.linears:
                    found.append(outcome)
        return found

    def _try(self, function: Function, free: set[str]) -> Outcome:
        """Trace every call of a function and match what is free; overlapping calls must agree."""
        key = (function.owner, function.name, frozenset(free & set(function.linears)))
        if key not in self.tried:
            self.tried[key] = self._try_anew(function, free)
        return self.tried[key]

    def _try_anew(self, function: Function, free: set[str]) -> Outcome:
        lead = _lead(function.owner)
        followed: list[Match] = []
        for args, kwargs in function.calls:
            try:
                found = self._follow(function, args, kwargs, free)
                followed.append(found)
                if any(".training" in guard for guard in found.program.guards):
                    followed.append(self._follow(function, args, kwargs, free, other_mode=True))
            except Untraceable as reason:
                for path in function.linears:
                    self.reasons.setdefault(path, (reason.code, reason.reason))
        for found in followed:
            self.reasons.update({lead + path: words for path, words in found.refused.items()})
        calls: list[Followed] = []
        layers: set[tuple[str, tuple[str, ...]]] = set()
        taken: set[str] = set()
        for found in sorted(followed, key=lambda m: -sum(len(f.paths) for f in m.fusions)):
            mine = {(f.rule, f.paths) for f in found.fusions}
            paths = {lead + path for f in found.fusions for path in f.paths}
            if paths and (mine <= layers or not paths & taken):
                calls.append(Followed(function, found))
                layers |= mine
                taken |= paths
        return Outcome(function, calls, taken, len(layers))

    def _follow(
        self, function: Function, args: Any, kwargs: Any, free: set[str], other_mode: bool = False
    ) -> Match:
        owner = self.modules[function.owner]
        lead = _lead(function.owner)
        leaves: dict[int, str] = {}
        followed: dict[int, str] = {}
        for path, module in owner.named_modules():
            (followed if id(module) in self.holders or module is owner else leaves)[id(module)] = path
        traits = {
            path.removeprefix(lead): self.known.traits[path]
            for path in self.known.candidates
            if path.startswith(lead) and path in free
        }
        tracer = Tracer(owner, leaves, followed)
        method = getattr(type(owner), function.name)
        modes = [(module, module.training) for module in owner.modules()]
        try:
            for module, mode in modes:
                module.training = mode != other_mode
            program = tracer.trace(method, copy_tensors(args), copy_tensors(kwargs))
        except Untraceable:
            raise
        except Exception as error:
            where = f"{function.name} of {type(owner).__name__}"
            raise Untraceable(
                "call-site-not-traced", f"{where} could not be followed: {type(error).__name__}: {error}"
            ) from error
        finally:
            for module, mode in modes:
                module.training = mode
        check_spelling(program)
        self.read.update(lead + node.target for node in program.nodes if node.kind == "tensor")
        return match(owner, program, traits, tracer.pin_shapes, lambda paths: self._is_list(lead, paths))

    def _is_list(self, lead: str, paths: Sequence[str]) -> bool:
        """Tell whether one Linear is written as a list, a ModuleList of length 1."""
        parent = self.modules[(lead + paths[0]).rpartition(".")[0]]
        return type(parent) is nn.ModuleList and len(parent) == 1

    # Writing.

    def _rewrite(self, call: Followed, fusion: Fusion) -> Rewrite:
        lead = _lead(call.function.owner)
        paths = tuple(lead + path for path in fusion.paths)
        for known in self.rewrites:
            if known.replaces == paths:
                return known
        owner = call.function.owner
        site = self.seen.sites.get(paths[0], call.function.name)
        rewrite = Rewrite(
            rule=fusion.rule,
            owner=owner,
            call_site=site,
            replaces=paths,
            into=self._into(owner, fusion, paths),
            guards=tuple(call.match.program.guards),
            in_features=fusion.traits.in_features,
            out_features=fusion.out_features,
            bias=fusion.traits.bias,
            spatial=fusion.traits.spatial,
            notes=tuple(_notes(call.match)),
        )
        self.rewrites.append(rewrite)
        return rewrite

    def _into(self, owner: str, fusion: Fusion, paths: tuple[str, ...]) -> str:
        parent = paths[0].rpartition(".")[0]
        module = self.modules[parent]
        whole = tuple(f"{parent}.{n}" for n in range(len(module))) if type(module) is nn.ModuleList else ()
        if whole == paths and fusion.rule == "linear_list" and not fusion.traits.spatial:
            return parent
        common = os.path.commonprefix(list(fusion.paths)).strip(".").replace(".", "_").rstrip("0123456789_")
        name = f"{common or 'linears'}_fused"
        position = 0
        while f"{_lead(owner)}{name}.{position}" in self.names:
            position += 1
        while position == 0 and hasattr(self.modules[owner], name):
            name += "_"
        into = f"{_lead(owner)}{name}.{position}"
        self.names.add(into)
        return into

    def _patches(self, outcome: Outcome, into: dict[int, list[Rewrite]]) -> list[Patch]:
        function = outcome.function
        lead = _lead(function.owner)
        sources: list[Source] = []
        for call in outcome.calls:
            layers = [spell_path(r.into.removeprefix(lead)) for r in into[id(call)]]
            sources.append(write(call.match, layers.__getitem__, lambda path: self._place(lead, path)))
        return [_patch(type(self.modules[function.owner]), function, sources)]

    def _place(self, lead: str, path: str) -> str:
        """The expression for a leaf module, parameter or buffer after the change."""
        whole = {r.into for r in self.rewrites if r.into in self.modules}
        if lead + path in self.modules:
            module, name = path, ""
        else:
            module, _, name = path.rpartition(".")
        parent, _, last = module.rpartition(".")
        text = spell_path(module) if lead + parent not in whole else f"{spell_path(parent)}[{last}]"
        if not name:
            return text
        return f"{text}.{name}" if name.isidentifier() else f"getattr({text}, {name!r})"

    # Accounting.

    def _skips(self) -> list[Skip]:
        gone = {path for r in self.rewrites for path in r.replaces}
        result = dict(self.known.skips)
        for path in self.known.candidates:
            if path not in gone:
                result[path] = skip(path, *self._reason(path, gone))
        return [result[path] for path in dict.fromkeys([*self.modules, *result]) if path in result]

    def _reason(self, path: str, gone: set[str]) -> tuple[str, str]:
        if path in self.reasons and not (self.reasons[path][0] == "chain" and not _numbered(path)):
            return self.reasons[path]
        if self.seen.counts[path] == 0 and f"{path}.weight" in self.read:
            return "functional-use", "its weight is read, and it is never called"
        if self.seen.counts[path] == 0:
            return "unused", "the example inputs never call it"
        traits, parent = self.known.traits[path], path.rpartition(".")[0]
        if type(self.modules[parent]) is nn.ModuleList:
            siblings = [
                t for p, t in self.known.traits.items() if p != path and p.rpartition(".")[0] == parent
            ]
            for other in siblings:
                if other.requires_grad != traits.requires_grad:
                    return (
                        "frozen-subset",
                        "some items of its list are frozen, and it is alone with its setting",
                    )
                if other.dtype != traits.dtype:
                    return "mixed-dtype", f"its dtype is {traits.dtype}, another item's {other.dtype}"
                if other.device != traits.device:
                    return "mixed-device", f"it is on {traits.device}, another item on {other.device}"
        return "single", "no other Linear of its shape is called beside it"


def _numbered(path: str) -> bool:
    """Tell whether a Linear is one of several by its name; else being used after another is no chain."""
    return any(letter.isdigit() for letter in path.rpartition(".")[2])


def _lead(path: str) -> str:
    return f"{path}." if path else ""


def _notes(found: Match) -> list[str]:
    if any(node.random for node, _ in found.lanes.pack_of.items()):
        return ["dropout of all items draws at once: in training its random numbers differ from the loop's"]
    return []


def _patch(base: type, function: Function, sources: list[Source]) -> Patch:
    """The whole method: each fast path behind its guards, then the original."""
    method = getattr(base, function.name)
    signature = inspect.signature(method)
    parameters, passed = [], []
    for position, (name, parameter) in enumerate(signature.parameters.items()):
        if position == 0:
            name, parameter = "self", parameter.replace(name="self")
        if parameter.default is not inspect.Parameter.empty:
            parameter = parameter.replace(default=_Name(f"_default_{name}"))
        parameters.append(parameter.replace(annotation=inspect.Parameter.empty))
        star = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        passed.append(f"{name}={name}" if parameter.kind is parameter.KEYWORD_ONLY else f"{star}{name}")
    head = inspect.Signature(parameters)
    lines = [f"def {function.name}{head}:"]
    constants: dict[str, tuple[str, str]] = {}
    for source in sources:
        condition = " and ".join(f"({guard})" for guard in source.guards) or "True"
        lines.append(f"    if {condition}:")
        lines += [f"        {line}" for line in source.lines]
        constants.update(source.constants)
    lines.append(f"    return _original({', '.join(passed)})")
    named = tuple((name, *where) for name, where in constants.items())
    return Patch(function.owner, function.name, "\n".join(lines) + "\n", named)


class _Name:
    """Stands for a default in a signature, and prints as the name it is known by."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name
