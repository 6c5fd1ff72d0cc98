"""LinearList: N separate linear maps of one shape, held as one stack and applied in one op."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops

_OLD_KEY = re.compile(r"(\d+)\.(weight|bias)")


class LinearList(nn.Module):
    """Apply N separate linear maps, each to its own slice of the input.

    Equivalent to a ``nn.ModuleList`` of N ``nn.Linear(in_features, out_features)`` and the loop over it,
    ``torch.stack([linears[n](x[..., n, :]) for n in range(N)], -2)``, in one op.

    Args:
        in_features: I, the size of each linear's input.
        out_features: O, the size of each linear's output.
        num_linears: N, how many linears there are; at least 1.
        bias: whether each linear adds a bias of its own.
        device, dtype: of the parameters, as for ``nn.Linear``.

    Attributes:
        weight: (N, O, I), each linear drawn as ``nn.Linear`` draws its own.
        bias: (N, O), or None.

    Input, told apart by the last dimensions:
        - (*, N, I) gives (*, N, O);
        - (*, 1, I) is shared by all linears and gives (*, N, O);
        - flat, (*, N * I) gives (*, N * O). For N = 1 flat and not flat coincide, and so do their results.
        The result is contiguous.

    It stands in for the list it replaces: ``len``, an index, a slice and iteration give heads, which are
    callable and show ``weight``, ``bias``, ``in_features`` and ``out_features`` as views of the stack.

    - Reading through a head and writing in place (``head.weight.copy_(t)`` under ``no_grad``,
      ``head.weight.data.mul_(2)``, ``nn.init.zeros_(head.weight)``) reach the stack.
    - ``head.weight = …``, ``head.parameters()`` and the rest of ``nn.Module`` raise and say what to do.
    - ``head.weight`` is a new view at each access. So ``head.weight.data = t`` rebinds that view only and is
      lost, and ``head.weight.grad`` is None: the gradient is ``self.weight.grad[n]``.
    - Calling heads in a loop costs a backward linear in N. Calling ``F.linear(x, head.weight)`` in a loop
      costs one quadratic in N, for each view's gradient is as large as the stack.

    ``load_state_dict`` also takes the keys of the replaced list (``0.weight``, ``0.bias``, …), and a weight
    of the shape (O, N * I), in which linear n owns the columns from ``n * I`` on.

    Raises:
        ValueError: sizes below 1.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_linears: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = (("in_features", in_features), ("out_features", out_features), ("num_linears", num_linears))
        for name, size in sizes:
            if size < 1:
                raise ValueError(f"LinearList: {name} must be at least 1, got {size}")
        self.in_features, self.out_features, self.num_linears = in_features, out_features, num_linears
        self._rows: dict[str, tuple[Tensor, tuple[int, int], tuple[Tensor, ...]]] = {}
        self.weight = nn.Parameter(
            torch.empty((num_linears, out_features, in_features), device=device, dtype=dtype)
        )
        if bias:
            self.bias = nn.Parameter(torch.empty((num_linears, out_features), device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias uniformly from (-1/sqrt(I), 1/sqrt(I)), nn.Linear's distribution."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map (*, N, I), or (*, 1, I) shared by all, to (*, N, O); flat (*, N * I) to (*, N * O)."""
        shape = x.shape
        if len(shape) > 1 and shape[-1] == self.in_features and shape[-2] in (self.num_linears, 1):
            return ops.linear_list(x, self.weight, self.bias)
        if len(shape) and shape[-1] == self.num_linears * self.in_features:
            x = x.unflatten(-1, (self.num_linears, self.in_features))
            return ops.linear_list(x, self.weight, self.bias).flatten(-2)
        n, i = self.num_linears, self.in_features
        raise ValueError(
            f"LinearList: x must be (*, N, I) = (*, {n}, {i}), (*, 1, {i}) or flat (*, N * I) = (*, {n * i}),"
            f" got {tuple(shape)}"
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" num_linears={self.num_linears}, bias={self.bias is not None}"
        )

    # The list it stands in for.

    def __len__(self) -> int:
        return self.num_linears

    @overload
    def __getitem__(self, index: int) -> "LinearHead": ...
    @overload
    def __getitem__(self, index: slice) -> "list[LinearHead]": ...
    def __getitem__(self, index: int | slice) -> "LinearHead | list[LinearHead]":
        if isinstance(index, slice):
            return [LinearHead(self, n) for n in range(*index.indices(self.num_linears))]
        n = operator.index(index)
        if not -self.num_linears <= n < self.num_linears:
            raise IndexError(f"LinearList: index {n} is out of range for {self.num_linears} linears")
        return LinearHead(self, n % self.num_linears)

    def __iter__(self) -> "Iterator[LinearHead]":
        return (LinearHead(self, n) for n in range(self.num_linears))

    def __setitem__(self, index: int, value: object) -> None:
        raise TypeError(
            "LinearList: a linear cannot be replaced; copy into it under torch.no_grad(),"
            f" `self[{index}].weight.copy_(…)`, or take `.to_linears()`"
        )

    def _row(self, name: str, n: int) -> Tensor | None:
        """Give linear n's weight or bias for a call; all rows of one stack state share one backward node.

        A select per head would make the backward of a loop quadratic in N. Rows are unbound once for each
        state of the parameter: the node saves nothing, so several backward passes may run through it.
        """
        stack = getattr(self, name)
        cacheable = (
            type(stack) is nn.Parameter
            and stack.requires_grad
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not ops.transform_active()
        )
        if not cacheable:
            return None if stack is None else stack[n]
        state = (stack._version, stack.data_ptr())
        known = self._rows.get(name)
        if known is None or known[0] is not stack or known[1] != state:
            known = self._rows[name] = (stack, state, stack.unbind(0))
        return known[2][n]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": {}}  # rows are no leaves: they can be neither copied nor pickled

    def _replicate_for_data_parallel(self) -> "LinearList":
        replica = super()._replicate_for_data_parallel()
        replica._rows = {}
        return replica

    # To and from a list of nn.Linear.

    @classmethod
    def from_linears(cls, linears: Iterable[nn.Module]) -> "LinearList":
        """Stack ``nn.Linear`` modules of one shape; the parameters are copied, exactly.

        Raises:
            TypeError: an item that is not precisely a plain ``nn.Linear`` (a subclass, parametrised, with
                hooks, a ``forward`` or tensors of its own).
            ValueError: no items; items that share parameters or differ in features, bias, dtype, device or
                ``requires_grad``.
        """
        items = list(linears)
        if not items:
            raise ValueError("LinearList.from_linears: linears must hold at least one nn.Linear, got none")
        for n, item in enumerate(items):
            _check_plain(n, item)
        _check_alike(items)
        first: Any = items[0]
        new = cls(
            first.in_features, first.out_features, len(items), bias=first.bias is not None, device="meta"
        )
        for name, old in first.named_parameters():
            stacked = torch.stack([item.get_parameter(name).detach() for item in items])
            setattr(new, name, nn.Parameter(stacked, requires_grad=old.requires_grad))
        return new.train(first.training)

    def to_linears(self) -> nn.ModuleList:
        """Return a ``nn.ModuleList`` of ``nn.Linear`` that hold copies of the parameters, exactly."""
        linears = nn.ModuleList()
        for n in range(self.num_linears):
            linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
            for name, stack in self.named_parameters():
                setattr(linear, name, nn.Parameter(stack[n].detach().clone(), stack.requires_grad))
            linears.append(linear)
        return linears.train(self.training)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        missing_keys, _, error_msgs = lists
        weight = state_dict.get(prefix + "weight")
        if isinstance(weight, Tensor) and weight.shape == (
            self.out_features,
            self.num_linears * self.in_features,
        ):
            columns = weight.view(self.out_features, self.num_linears, self.in_features)
            state_dict[prefix + "weight"] = columns.transpose(0, 1).contiguous()
        gone = self._stack_old_keys(state_dict, prefix, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        for name, keys in gone.items():  # say what is missing in the file's own names
            if prefix + name in missing_keys:
                missing_keys.remove(prefix + name)
            missing_keys.extend(keys)

    def _stack_old_keys(
        self, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
    ) -> dict[str, list[str]]:
        """Replace ``0.weight`` … by ``weight``; return the old keys that are missing."""
        if not any(k.startswith(prefix) and _OLD_KEY.fullmatch(k, len(prefix)) for k in state_dict):
            return {}
        gone: dict[str, list[str]] = {}
        for name, stack in self._parameters.items():
            keys = [f"{prefix}{n}.{name}" for n in range(self.num_linears)]
            if stack is None or prefix + name in state_dict:
                continue
            gone[name] = [k for k in keys if k not in state_dict]
            found = {n: state_dict.pop(k) for n, k in enumerate(keys) if k in state_dict}
            wrong = {n: tuple(t.shape) for n, t in found.items() if t.shape != stack.shape[1:]}
            for n, shape in wrong.items():
                error_msgs.append(
                    f"size mismatch for {keys[n]}: copying a param with shape {shape} from checkpoint,"
                    f" the shape in current model is {tuple(stack.shape[1:])}."
                )
            if wrong or not found:
                continue
            rows = [found[n] if n in found else stack[n].detach() for n in range(self.num_linears)]
            state_dict[prefix + name] = torch.stack(rows)
        return gone


class LinearHead:
    """One linear of a `LinearList`: callable like the ``nn.Linear`` it stands for, a view of the stack."""

    __slots__ = ("_index", "_list")

    def __init__(self, linear_list: LinearList, index: int) -> None:
        object.__setattr__(self, "_list", linear_list)
        object.__setattr__(self, "_index", index)

    def __call__(self, x: Tensor) -> Tensor:
        n, stack = self._index, self._list
        return F.linear(x, stack._row("weight", n), stack._row("bias", n))

    forward = __call__

    @property
    def weight(self) -> Tensor:
        return self._list.weight[self._index]

    @property
    def bias(self) -> Tensor | None:
        bias = self._list.bias
        return None if bias is None else bias[self._index]

    @property
    def in_features(self) -> int:
        return self._list.in_features

    @property
    def out_features(self) -> int:
        return self._list.out_features

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"LinearList: {name} of a head cannot be set, it is a view of the list's; write in place under"
            f" torch.no_grad(), `head.{name}.copy_(…)`, or take `.to_linears()`"
        )

    def __getattr__(self, name: str) -> Any:
        if hasattr(nn.Linear, name):
            raise AttributeError(
                f"LinearList: a head has no {name}, its parameters are rows of the list's; use the list"
                " (`list.weight`, `list.parameters()`), or take `.to_linears()`"
            )
        raise AttributeError(f"'LinearHead' object has no attribute '{name}'")

    def __reduce__(self) -> tuple[Callable[..., "LinearHead"], tuple[LinearList, int]]:
        return LinearHead, (self._list, self._index)

    def __repr__(self) -> str:
        has_bias = self._list.bias is not None
        return (
            f"LinearHead(in_features={self.in_features}, out_features={self.out_features}, bias={has_bias},"
            f" index={self._index})"
        )


def _check_plain(n: int, item: Any) -> None:
    """Refuse what is not precisely an ``nn.Linear``, with the reason."""
    where = f"LinearList.from_linears: linears[{n}]"
    if type(item) is not nn.Linear:
        raise TypeError(f"{where} must be precisely an nn.Linear, got {type(item).__name__}")
    hooks = [name for name, value in vars(item).items() if name.endswith("_hooks") and value]
    if hooks:
        raise TypeError(f"{where} must have no hooks, got {', '.join(hooks)}")
    if "forward" in vars(item):
        raise TypeError(f"{where} must have nn.Linear's forward, got one of its own")
    own = {*item._parameters, *item._buffers, *item._modules} - {"weight", "bias"}
    if own or {"weight", "bias"} - set(item._parameters):
        found = sorted({*item._parameters, *item._buffers, *item._modules})
        raise TypeError(f"{where} must own just weight and bias, got {', '.join(found)}")
    for name, parameter in item.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise TypeError(f"{where}.{name} must be a plain nn.Parameter, got {type(parameter).__name__}")


def _check_alike(items: list[Any]) -> None:
    """Refuse linears that one stack cannot hold, with the first difference."""
    seen: dict[int, int] = {}
    traits: dict[str, Callable[[Any], object]] = {
        "in_features": lambda m: m.weight.shape[1],
        "out_features": lambda m: m.weight.shape[0],
        "bias": lambda m: m.bias is not None,
        "dtype": lambda m: m.weight.dtype,
        "device": lambda m: m.weight.device,
        "requires_grad": lambda m: tuple(p.requires_grad for p in m.parameters()),
    }
    expected = {name: trait(items[0]) for name, trait in traits.items()}
    for n, item in enumerate(items):
        for name, trait in traits.items():
            if trait(item) != expected[name]:
                raise ValueError(
                    f"LinearList.from_linears: all linears must have the same {name}; linears[0] has"
                    f" {expected[name]}, linears[{n}] has {trait(item)}"
                )
        for parameter in item.parameters():
            if id(parameter) in seen:
                raise ValueError(
                    f"LinearList.from_linears: linears[{seen[id(parameter)]}] and linears[{n}] share a"
                    " parameter; a stack would untie them"
                )
        seen.update({id(parameter): n for parameter in item.parameters()})
