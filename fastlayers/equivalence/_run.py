"""One run of one model: its outputs, the gradients of inputs and parameters, and what happened on the way."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ._draws import ConstantDraws, Draws, RandomState
from ._subject import Subject
from ._taps import Taps
from ._tree import copy_with, is_differentiable, nodes, tensors, wide

Inputs = tuple[Any, ...] | dict[str, Any]


@dataclass
class Run:
    """Results, detached. `structure`: path and type (bool, int, str: and value) of all in the output."""

    outputs: dict[str, Tensor]
    structure: list[tuple[str, str]]
    input_grads: dict[str, Tensor | None] = field(default_factory=dict)
    parameter_grads: dict[str, Tensor | None] = field(default_factory=dict)
    differentiable: list[str] = field(default_factory=list)
    changed_inputs: list[str] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    drew: bool = False
    draw_mismatch: str = ""


class Runner:
    """Runs copies of models on one set of inputs, each time from the same random state."""

    def __init__(self, inputs: Inputs, random_state: RandomState, seed: int) -> None:
        self.inputs = inputs
        self._random_state = random_state
        self._seed = seed

    def run(
        self,
        subject: Subject,
        mode: str,
        *,
        widened: bool = False,
        mapped: bool = False,
        grad: bool = True,
        backward: bool = True,
        record: Draws | None = None,
        replay: Draws | None = None,
        constant: bool = False,
        taps: Taps | None = None,
        inputs: Inputs | None = None,
    ) -> Run:
        """Run `subject` in `mode` and put it back; whatever the model raises passes through.

        `widened`: in float64; `mapped`: float32 in the code means float64 too. `record`, `replay` or make
        `constant` random draws; `inputs` instead of the runner's own.
        """
        subject.widen() if widened else subject.narrow()
        subject.set_mode(mode)
        self._random_state.restore()
        given = self.inputs if inputs is None else inputs
        leaves: list[tuple[Tensor, Tensor]] = []

        def fresh(tensor: Tensor) -> Tensor:
            value = tensor.detach().clone()
            if widened:
                value = value.to(wide(value.dtype))
            if not (grad and is_differentiable(value)):
                leaves.append((tensor, value))
                return value
            value.requires_grad_()
            leaves.append((tensor, value))
            return value.clone()  # no leaf, so that the model may write into it

        arguments = copy_with(given, fresh)
        if taps is None:
            taps = Taps(subject.model, (), subject.cheap_slices if grad else ())
        replaying = None if replay is None else replay.replay()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(_without_collector())
                stack.enter_context(torch.set_grad_enabled(grad))
                stack.enter_context(quiet())
                if mapped:
                    stack.enter_context(_MapToFloat64())
                if record is not None:
                    stack.enter_context(record.record())
                if constant:
                    stack.enter_context(ConstantDraws())
                if replaying is not None:
                    stack.enter_context(replaying)
                with taps:
                    output = (
                        subject.model(**arguments)
                        if isinstance(arguments, dict)
                        else subject.model(*arguments)
                    )
                result = _summary(output, widened)
                if grad and backward:
                    self._backward(output, result, given, leaves)
                    result.parameter_grads = subject.gradients(taps.called)
        finally:
            moved = self._random_state.moved()
            self._random_state.restore()
            buffers = subject.buffers()
            subject.restore()
        result.buffers = buffers
        result.drew = moved
        result.draw_mismatch = "" if replaying is None else replaying.mismatch
        return result

    def _backward(self, output: Any, result: Run, given: Any, leaves: list[tuple[Tensor, Tensor]]) -> None:
        targets = [(path, t) for path, t in tensors(output) if is_differentiable(t) and t.requires_grad]
        result.differentiable = [path for path, _ in targets]
        if targets:
            self._loss([t for _, t in targets]).backward()
        by_tensor = {id(tensor): leaf.grad for tensor, leaf in leaves}
        for path, tensor in tensors(given):
            if is_differentiable(tensor):
                result.input_grads[path] = by_tensor[id(tensor)]

    def _loss(self, outputs: list[Tensor]) -> Tensor:
        """A made-up loss whose gradients are the same numbers, exact in half types, in every run."""
        generator = torch.Generator().manual_seed(self._seed)
        loss = torch.zeros(())
        for t in outputs:
            t = torch.view_as_real(t) if t.is_complex() else t
            grad_out = torch.randn(t.shape, generator=generator, dtype=torch.float32).bfloat16()
            loss = loss + (t * grad_out.to(device=t.device, dtype=t.dtype)).sum().cpu()
        return loss


def _summary(output: Any, widened: bool) -> Run:
    outputs: dict[str, Tensor] = {}
    structure = []
    for path, value in nodes(output, "output"):
        structure.append((path, _described(value)))
        if isinstance(value, Tensor):
            outputs[path] = (
                value.detach().to_dense() if value.layout != torch.strided else value.detach().clone()
            )
        elif isinstance(value, (float, complex)):  # read off a tensor, as precise as that was
            narrow = torch.complex64 if isinstance(value, complex) else torch.float32
            outputs[path] = torch.tensor(value, dtype=wide(narrow) if widened else narrow)
    return Run(outputs, structure)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return "Tensor"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{kind} {value!r}" if isinstance(value, (bool, int, str, type(None))) else kind


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """A graph of 10,000 Linears is so many objects that Python's collector takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The user has seen the warnings of the own model; here it runs many times."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class _MapToFloat64(TorchFunctionMode):
    """Code that names float32 (`.float()`, `dtype=torch.float32`) gets float64; so do default dtypes."""

    _CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)

    def __enter__(self) -> _MapToFloat64:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._CASTS:
            return args[0].double()
        args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in _NARROW else a for a in args)
        kwargs = {
            k: torch.float64 if isinstance(v, torch.dtype) and v in _NARROW else v
            for k, v in (kwargs or {}).items()
        }
        return func(*args, **kwargs)
