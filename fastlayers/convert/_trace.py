"""Trace one method of a module: run it on real values, behind stand-ins that write down every operation.

Python sees real values wherever it asks (`len`, `range`, `if`), and each answer becomes a guard. Modules that
hold no candidate Linear, and the candidates themselves, are single operations; all others are followed.
"""

import contextlib
import functools
import inspect
import operator
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ._program import Node, Program, map_nodes, nodes_in, storages, tensors_in
from ._proxy import Proxy, has_proxies

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ATOMS = {bool, int, float, str, type(None)}
# Functions whose C++ signatures would turn a traced size into a plain number before anyone sees it.
_FACTORIES = [
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "linspace",
    "rand",
    "randn",
    "randint",
    "eye",
    "tensor",
    "randperm",
]
_SHAPE_SOURCES = ("shape", "size", "numel", "nelement", "stride", "dtype", "device", "is_cuda")


# Contexts that may change nothing in the trace and much in a later call.
_CONTEXTS: tuple[Any, ...] = (torch.autocast, torch.enable_grad, torch.inference_mode)
# Candidates whose forward people also call directly.
_LEAF_KINDS: tuple[Any, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Untraceable(Exception):
    """A function that cannot be followed, with the reason code and words of the skip it leads to."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Tracer:
    """Follows one call of one method.

    Args:
        owner: the module whose method it is (in the copy that is looked at).
        leaves: modules that are single operations, by id, with their path from the owner.
        followed: modules that are followed, by id, with their path from the owner ("" is the owner).
    """

    def __init__(self, owner: nn.Module, leaves: dict[int, str], followed: dict[int, str]) -> None:
        self.owner, self.leaves, self.followed = owner, leaves, followed
        self.program = Program()
        self._leaf_modules = dict(owner.named_modules(remove_duplicate=False))
        self._tensors = {id(t): name for name, t in _named_tensors(owner)}
        self._tensor_nodes: dict[str, Node] = {}
        self._attribute_nodes: dict[str, Node] = {}
        self._busy = False
        self._pinned = False
        self._inputs: list[Node] = []
        self._modes: tuple[Any, ...] = ()

    # What the stand-ins call.

    def call(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function on the values and write it down; what came back stands for its result."""
        return self._record("call", function, args, kwargs, function)

    def method(self, proxy: Proxy, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        def run(value: Any, *rest: Any, **named: Any) -> Any:
            return getattr(value, name)(*rest, **named)

        return self._record("method", name, (proxy, *args), kwargs, run)

    def attribute(self, proxy: Proxy, name: str) -> Any:
        return self._record("attribute", name, (proxy,), {}, lambda value: getattr(value, name))

    def look(self, value: Any, name: str) -> Any:
        """Read an attribute of a real value, unwatched."""
        busy, self._busy = self._busy, True
        try:
            return getattr(value, name)
        finally:
            self._busy = busy

    def known(self, node: Node, convert: Callable[[Any], Any]) -> Any:
        """Give Python a value, and guard on it: by an expression over the inputs, else by their shapes."""
        if isinstance(node.value, Tensor):
            raise self.data_dependent("Python looks at the values of a tensor")
        expression = self._expression(node)
        if expression is None:
            self.pin_shapes()
        else:
            # A bool by itself: torch.compile cannot compare a symbolic comparison with True.
            plain = f"{expression} == {node.value!r}"
            known = {True: expression, False: f"not {expression}"}
            self.guard(known[node.value] if type(node.value) is bool else plain, "the code depends on it")
        return convert(node.value)

    def guard(self, expression: str, why: str) -> None:
        self.program.guards.setdefault(expression, why)

    def data_dependent(self, reason: str) -> Untraceable:
        return Untraceable("data-dependent", f"{reason} ({self._line()})")

    def untraceable(self, reason: str) -> Untraceable:
        return Untraceable("call-site-not-traced", f"{reason} ({self._line()})")

    # The run itself.

    def trace(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """Follow ``function(owner, *args, **kwargs)``. Raises Untraceable."""
        bound = inspect.signature(function).bind(self.owner, *args, **kwargs)
        names = list(bound.arguments)[1:]
        given = {name: self._input(name, bound.arguments[name]) for name in names}
        parameters = inspect.signature(function).parameters
        positional, named = [], {}
        for name in names:
            kind = parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                positional += given[name]
            elif kind is inspect.Parameter.VAR_KEYWORD:
                named.update(given[name])
            elif kind is inspect.Parameter.KEYWORD_ONLY:
                named[name] = given[name]
            else:
                positional.append(given[name])
        before, drawn = self._attributes(), _python_randomness()
        with torch.enable_grad(), self._watching():
            self._modes = _modes()
            result = function(self.owner, *positional, **named)
        self.program.result = self._unwrap(result)
        if _python_randomness() != drawn:
            raise Untraceable("data-dependent", "it draws random numbers from Python or numpy")
        after = self._attributes()
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        if changed:
            raise Untraceable("call-site-not-traced", f"it changes the attribute {changed[0]!r}")
        return self.program

    def _attributes(self) -> dict[str, Any]:
        """What the followed modules hold, down to the items of plain containers, by identity."""
        found = {}
        for module in self._modules_followed():
            for name, value in vars(module).items():
                key = f"{self.followed[id(module)]}.{name}".strip(".")
                items: Any = None
                if type(value) in (list, tuple, set):
                    items = tuple(map(id, value))
                elif isinstance(value, dict):
                    items = tuple((k, id(v)) for k, v in value.items())
                found[key] = (id(value), items)
        return found

    def _input(self, expression: str, value: Any) -> Any:
        """Stand-ins for the tensors of an argument; guards for all else."""
        if isinstance(value, Tensor):
            node = self._add(Node("input", expression, value=value))
            self._inputs.append(node)
            self.guard(f"isinstance({expression}, torch.Tensor)", "a tensor")
            self.guard(f"{expression}.ndim == {value.ndim}", "the number of dimensions")
            return Proxy(self, node)
        if isinstance(value, nn.Module):
            path = self.followed.get(id(value), self.leaves.get(id(value)))
            if path is None:
                raise self.untraceable(f"argument {expression} is a module that its owner does not hold")
            self.guard(f"{expression} is {spell_path(path)}", "which module is passed")
            return value
        if type(value) in (list, tuple):
            self.guard(f"type({expression}) is {type(value).__name__}", "the type of a container")
            self.guard(f"len({expression}) == {len(value)}", "how many there are")
            return type(value)(self._input(f"{expression}[{i}]", item) for i, item in enumerate(value))
        if type(value) is dict and all(isinstance(key, (str, int)) for key in value):
            self.guard(f"type({expression}) is dict", "the type of a container")
            self.guard(f"list({expression}) == {list(value)!r}", "the keys and their order")
            return {key: self._input(f"{expression}[{key!r}]", item) for key, item in value.items()}
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            if isinstance(value, (bool, type(None))):
                self.guard(f"{expression} is {value!r}", "an argument the code may depend on")
            else:
                self.guard(f"{expression} == {spell(value)}", "an argument the code may depend on")
            return value
        raise self.untraceable(f"argument {expression} is a {type(value).__name__}")

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Write down calls of torch functions and modules and reads of attributes while this lasts."""
        tracer = self
        original_call = nn.Module.__call__
        factories = {name: getattr(torch, name) for name in _FACTORIES}

        class Mode(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                name = getattr(func, "__name__", "")
                if tracer._busy or func in _QUIET:
                    return func(*args, **(kwargs or {}))
                if name == "__get__" and func.__self__.__name__ in (*_SHAPE_SOURCES, "ndim", "requires_grad"):
                    return func(*args)  # a fact about a parameter
                if name == "__get__":
                    attribute = func.__self__.__name__
                    return tracer._record(
                        "attribute", attribute, args[:1], {}, lambda v: getattr(v, attribute)
                    )
                return tracer.call(func, args, kwargs or {})

        def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = tracer.leaves.get(id(module))
            if tracer._busy or path is None:
                if not tracer._busy and id(module) not in tracer.followed and has_proxies((args, kwargs)):
                    raise tracer.untraceable(
                        f"it calls a {type(module).__name__} that its owner does not hold"
                    )
                return original_call(module, *args, **kwargs)
            return tracer._record(
                "module", path, args, kwargs, lambda *a, **k: original_call(module, *a, **k)
            )

        forwards = {kind: kind.forward for kind in _LEAF_KINDS}

        def leaf_forward(original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                path = None if tracer._busy else tracer.leaves.get(id(module))
                if path is None:
                    return original(module, *args, **kwargs)
                return tracer._record("module", path, args, kwargs, lambda *a, **k: original(module, *a, **k))

            return forward

        def factory(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if not tracer._busy and has_proxies((args, kwargs)):
                    return tracer.call(function, args, kwargs)
                return function(*args, **kwargs)

            return wrapped

        apply = torch.autograd.Function.__dict__["apply"]

        def apply_function(kind: Any, *args: Any, **kwargs: Any) -> Any:
            run = apply.__get__(None, kind)
            if tracer._busy or not has_proxies((args, kwargs)):
                return run(*args, **kwargs)
            return tracer._record("call", kind.apply, args, kwargs, run)

        contexts = {kind: kind.__enter__ for kind in _CONTEXTS}

        def enter(context: Any) -> Any:
            if tracer._busy:
                return contexts[type(context)](context)
            raise tracer.untraceable(f"it enters torch.{type(context).__name__}")

        classes = [(module, type(module)) for module in self._modules_followed()]
        for kind in contexts:
            kind.__enter__ = enter
        torch.autograd.Function.apply = classmethod(apply_function)  # type: ignore[assignment]
        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        for kind, forward in forwards.items():
            kind.forward = leaf_forward(forward)
        for name, function in factories.items():
            setattr(torch, name, factory(function))
        try:
            for module, kind in classes:
                module.__class__ = self._watched(kind)
            with Mode():
                yield
        finally:
            for kind, entered in contexts.items():
                kind.__enter__ = entered
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]
            for module, kind in classes:
                module.__class__ = kind
            for name, function in factories.items():
                setattr(torch, name, function)
            for kind, forward in forwards.items():
                kind.forward = forward
            nn.Module.__call__ = original_call  # type: ignore[method-assign]

    def _modules_followed(self) -> list[nn.Module]:
        return [m for m in self.owner.modules() if id(m) in self.followed]

    def _watched(self, kind: type) -> type:
        """A subclass that tells the tracer which plain attributes are read."""
        tracer = self
        getattribute: Any = kind.__getattribute__

        def watch(module: Any, name: str) -> Any:
            value = getattribute(module, name)
            if tracer._busy or name.startswith("_") or id(module) not in tracer.followed:
                return value
            if name == "training" and type(value) is bool:
                return tracer._training(module, value)
            if (type(value) in _PLAIN and name not in ("__class__",)) or (
                type(value) in (list, tuple, dict, set) and _plain(value)
            ):
                where = spell_path(tracer.followed[id(module)])
                tracer.guard(f"{where}.{name} == {spell(value)}", "an attribute the code reads")
            return value

        watched = type(kind.__name__, (kind,), {"__getattribute__": watch, "__module__": kind.__module__})
        watched.__qualname__ = kind.__qualname__
        return watched

    def _training(self, module: nn.Module, value: bool) -> Proxy:
        expression = f"{spell_path(self.followed[id(module)])}.training"
        if expression not in self._attribute_nodes:
            self._attribute_nodes[expression] = self._add(Node("input", expression, value=value))
        return Proxy(self, self._attribute_nodes[expression])

    # Writing down.

    def _record(
        self, kind: str, target: Any, args: Any, kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Any:
        if _modes() != self._modes:
            raise self.untraceable("it switches gradients or autocast on or off")
        args, kwargs = self._unwrap(tuple(args)), self._unwrap(dict(kwargs))
        node = Node(kind, target, args, kwargs, line=self._line())
        self._busy = True
        try:
            with torch._C.DisableTorchFunction():
                self._run(node, run)
        finally:
            self._busy = False
        return self._wrap(self._add(node))

    def _run(self, node: Node, run: Callable[..., Any]) -> None:
        """Run an operation on the values; note what it changes in place and whether it draws."""
        operands = list(node.operands())
        touched = [t for n in operands for t in tensors_in(n.value)]
        module = self._leaf_modules[node.target] if node.kind == "module" else None
        simple = node.kind == "attribute" or node.target is operator.getitem or type(module) in _LEAF_KINDS
        if module is not None and not simple:
            touched += [*module.parameters(), *module.buffers()]
        node.dynamic = any(n.dynamic for n in operands) or _is_dynamic(node)
        before = [t._version for t in touched]
        state = None if simple else torch.default_generator.get_state()
        node.value = run(*map_nodes(node.args, _value), **map_nodes(node.kwargs, _value))
        changed = [t for t, version in zip(touched, before, strict=True) if t._version != version]
        if changed:
            node.writes = frozenset(storages(changed))
        if state is not None:
            drew = not torch.equal(state, torch.default_generator.get_state())
            node.random = drew or _may_draw(node, module)

    def _add(self, node: Node) -> Node:
        node.index = len(self.program.nodes)
        self.program.nodes.append(node)
        return node

    def _wrap(self, node: Node) -> Any:
        """A stand-in for a result; tuples and lists come apart, so that Python can go through them."""
        value = node.value
        if type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            items = [
                self._wrap(self._add(Node("call", operator.getitem, (node, i), {}, item, node.line)))
                for i, item in enumerate(value)
            ]
            if node.kind in ("call", "method") and len(items) > 1:
                self._fixed_length(node)
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if value is None or value is NotImplemented or isinstance(value, (str, torch.finfo)):
            return value
        if isinstance(value, (Tensor, torch.Size, int, float, bool, torch.dtype, torch.device)):
            return Proxy(self, node)
        if isinstance(value, tuple):  # torch.return_types
            self._fixed_length(node)
            return type(value)(
                self._wrap(self._add(Node("call", operator.getitem, (node, i), {}, item, node.line)))
                for i, item in enumerate(value)
            )
        raise self.untraceable(f"an operation gives a {type(value).__name__}")

    def _fixed_length(self, node: Node) -> None:
        """How many pieces a tensor comes apart into depends on its size, unless the code says how many."""
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name in ("unbind", "split", "chunk", "tensor_split", "split_with_sizes"):
            source = node.args[0]
            dim = node.kwargs.get("dim", node.args[1] if name == "unbind" and len(node.args) > 1 else None)
            if name != "unbind":
                dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else None)
            dim = 0 if dim is None else dim
            if isinstance(source, Node) and isinstance(source.value, Tensor) and isinstance(dim, int):
                size = self._unwrap(self.attribute(Proxy(self, source), "shape"))
                shape = Node(
                    "call",
                    operator.getitem,
                    (size, dim),
                    {},
                    self.look(source.value, "shape")[dim],
                    node.line,
                )
                self.known(self._add(shape), int)

    def _unwrap(self, value: Any) -> Any:
        """Replace stand-ins and the owner's tensors by nodes."""
        kind = type(value)
        if kind is Proxy:
            return value._node
        if kind in _ATOMS:
            return value
        if kind is tuple:
            return tuple([self._unwrap(item) for item in value])
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is slice:
            return slice(*(self._unwrap(item) for item in (value.start, value.stop, value.step)))
        if isinstance(value, tuple):
            items = [self._unwrap(item) for item in value]
            return (
                kind(*items)
                if hasattr(value, "_fields")
                else (kind(items) if kind is not torch.Size else tuple(items))
            )
        if isinstance(value, list):
            return [self._unwrap(item) for item in value]
        if isinstance(value, dict):
            return kind((key, self._unwrap(item)) for key, item in value.items())
        if isinstance(value, _PLAIN) or callable(value) or value is Ellipsis:
            return value
        if isinstance(value, (torch.memory_format, torch.layout, set, frozenset, range)):
            return value
        raise self.untraceable(f"a {type(value).__name__} takes part in it")

    def _tensor(self, tensor: Tensor) -> Node:
        name = self._tensors.get(id(tensor))
        if name is None:
            raise self.untraceable("it uses a tensor that is neither an argument nor held by a module")
        if name not in self._tensor_nodes:
            self._tensor_nodes[name] = self._add(Node("tensor", name, value=tensor))
        return self._tensor_nodes[name]

    def _expression(self, node: Node) -> str | None:
        """A node computed from the shapes of inputs alone, as Python over the arguments; else None."""
        if node.kind == "input":
            return node.target
        if node.kind == "attribute" and node.target in _SHAPE_SOURCES:
            inner = node.args[0]
            return f"{inner.target}.{node.target}" if inner.kind == "input" else None
        if node.kind == "method" and node.target in _SHAPE_SOURCES and node.args[0].kind == "input":
            if not node.kwargs and all(isinstance(a, int) for a in node.args[1:]):
                return f"{node.args[0].target}.{node.target}({', '.join(map(repr, node.args[1:]))})"
            return None
        if node.kind == "call" and node.target in _SPELLED and not node.kwargs:
            parts = [self._expression(a) if isinstance(a, Node) else spell(a) for a in node.args]
            if any(part is None for part in parts) or any(
                isinstance(n.value, Tensor) for n in node.operands()
            ):
                return None
            return _SPELLED[node.target].format(*parts)
        return None

    def pin_shapes(self) -> None:
        if not self._pinned:
            self._pinned = True
            for node in self._inputs:
                self.guard(
                    f"{node.target}.shape == {tuple(self.look(node.value, 'shape'))!r}",
                    "a shape inside depends on it",
                )

    def _line(self) -> str:
        frame = sys._getframe(1)
        while frame is not None and _foreign(frame.f_code.co_filename):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            return ""
        return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _modes() -> tuple[Any, ...]:
    """What contexts can switch: gradients, inference mode and autocast of each kind of device."""
    casts = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts


def _python_randomness() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return random.getstate(), None if state is None else (*state[:1], state[1].tobytes(), *state[2:])


_SPELLED = {
    operator.add: "({} + {})",
    operator.sub: "({} - {})",
    operator.mul: "({} * {})",
    operator.floordiv: "({} // {})",
    operator.mod: "({} % {})",
    operator.truediv: "({} / {})",
    operator.neg: "(-{})",
    operator.getitem: "{}[{}]",
    operator.eq: "({} == {})",
    operator.ne: "({} != {})",
    operator.lt: "({} < {})",
    operator.le: "({} <= {})",
    operator.gt: "({} > {})",
    operator.ge: "({} >= {})",
}
# Questions that torch answers itself: they compute nothing.
_QUIET = {torch.is_tensor, torch.is_grad_enabled, torch.is_autocast_enabled, torch.jit.is_scripting}
_HERE = __file__.rpartition("/")[0]
_TORCH = torch.__file__.rpartition("/")[0]


@functools.cache
def _foreign(filename: str) -> bool:
    return filename.startswith((_HERE, _TORCH, "<"))


_DYNAMIC = (
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
    "repeat_interleave",
    "bincount",
)


def _is_dynamic(node: Node) -> bool:
    """Tell whether an operation's result has a shape that depends on values."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "where" and len(node.args) + len(node.kwargs) == 1:
        return True
    if name in ("getitem", "index", "__getitem__"):
        kinds = (torch.bool, torch.uint8)
        return any(isinstance(n.value, Tensor) and n.value.dtype in kinds for n in nodes_in(node.args[1:]))
    return name in _DYNAMIC and node.kind in ("call", "method")


def _may_draw(node: Node, module: nn.Module | None) -> bool:
    """Dropout draws in training mode even if the example ran in eval mode."""
    if module is not None:
        return any("dropout" in type(m).__name__.lower() for m in module.modules())
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return "dropout" in name


def _value(node: Node) -> Any:
    return node.value


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_plain(k) and _plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple, set)):
        return all(_plain(item) for item in value)
    return type(value) in _PLAIN


def _named_tensors(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from owner.named_parameters(remove_duplicate=False)
    yield from owner.named_buffers(remove_duplicate=False)


def spell(value: Any) -> str:
    """A plain value as Python."""
    if isinstance(value, float) and value != value:
        return "float('nan')"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f"float('{value}')"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, slice):
        return f"slice({spell(value.start)}, {spell(value.stop)}, {spell(value.step)})"
    if isinstance(value, tuple):
        return "(" + "".join(f"{spell(item)}, " for item in value) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(spell(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{spell(k)}: {spell(v)}" for k, v in value.items()) + "}"
    return repr(value)


def spell_path(path: str) -> str:
    """The expression for a path from the owner: "mu.0" -> "self._modules['mu']._modules['0']"."""
    return "self" + "".join(f"._modules[{part!r}]" for part in path.split(".") if part)
