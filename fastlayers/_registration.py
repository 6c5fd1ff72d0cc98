"""What every op needs of PyTorch's dispatcher: the library it is defined in, transforms, autocast."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

library = torch.library.Library("fastlayers", "FRAGMENT")


def transform_active() -> bool:
    """Tell whether torch.func or forward AD is at work: a registered backward serves neither (0.07 us)."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def autocast_now(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Cast as `F.linear` does under an active autocast; float64 and complex tensors stay as they are."""
    device_type = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    castable = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(t.to(dtype) if t is not None and t.dtype in castable else t for t in tensors)


def register_autocast(name: str, cast: Callable[..., tuple[Any, ...]]) -> None:
    """Register autocast of an op for the CPU and CUDA; ``cast`` gives the op's arguments, cast."""
    op = getattr(torch.ops.fastlayers, name).default
    for key in ("AutocastCPU", "AutocastCUDA"):
        exclude = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def kernel(*args: Any, exclude: Any = exclude, **kwargs: Any) -> Tensor:
            args = cast(*args, **kwargs)  # before the guard, which turns autocast off
            with torch._C._ExcludeDispatchKeyGuard(exclude):
                return op(*args)

        library.impl(name, kernel, key)
