"""FusedLinear: what stands where a Linear stood whose weight is part of a larger layer now."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .._linear_list import LinearList


class FusedLinear(nn.Module):
    """One Linear (or 1x1 convolution) of a fused layer, at its old place in the model.

    It holds no parameters: ``weight`` and ``bias`` are views of the fused layer's, so that code that reads
    them, or writes to them in place under ``torch.no_grad()``, keeps working. Assigning them raises.

    Args:
        layer: the fused layer, a `LinearList` or one wide ``nn.Linear``.
        part: which linear of the list, or the (first, last + 1) rows of the wide layer.
        spatial: 0 for a Linear, else the number of spatial dimensions of a 1x1 convolution.
    """

    def __init__(self, layer: nn.Module, part: int | tuple[int, int], spatial: int = 0) -> None:
        super().__init__()
        # In a tuple the layer is no submodule of this one: its parameters are listed once, where it lives.
        self._layer: tuple[nn.Module, ...] = (layer,)
        self._part, self._spatial = part, spatial

    @property
    def _fused(self) -> Any:
        if not self._layer:
            raise RuntimeError(
                "FusedLinear: in a DataParallel replica the layer that this Linear is part of is known only"
                " once the converted module around it is called; call that first, or revert the conversion"
            )
        return self._layer[0]

    def _replicate_for_data_parallel(self) -> "FusedLinear":
        replica = super()._replicate_for_data_parallel()
        replica._layer = ()
        return replica

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._row("weight"), self._row("bias")
        assert weight is not None
        if self._spatial == 0:
            return F.linear(x, weight, bias)
        return F.linear(x.movedim(-1 - self._spatial, -1), weight, bias).movedim(-1, -1 - self._spatial)

    def _row(self, name: str) -> Tensor | None:
        layer = self._fused
        if isinstance(layer, LinearList):
            return layer._row(name, self._part)  # type: ignore[arg-type]
        return self._view(name)

    def _view(self, name: str) -> Tensor | None:
        tensor = getattr(self._fused, name)
        if tensor is None:
            return None
        return tensor[slice(*self._part)] if isinstance(self._part, tuple) else tensor[self._part]

    @property
    def weight(self) -> Tensor:
        weight = self._view("weight")
        assert weight is not None
        return weight.reshape(*weight.shape, *(1,) * self._spatial)

    @property
    def bias(self) -> Tensor | None:
        return self._view("bias")

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            raise AttributeError(
                f"FusedLinear: {name} is a view of the fused layer's and cannot be set; write in place under"
                f" torch.no_grad(), `.{name}.copy_(…)`, or revert the conversion"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        part = self._part if isinstance(self._part, int) else "{}:{}".format(*self._part)
        return f"in_features={self.in_features}, out_features={self.out_features}, part={part}"


def bind_heads(original: nn.Module, replica: nn.Module, args: Any) -> None:
    """Give the heads in a DataParallel replica of ``original`` the replicas of their layers.

    A forward pre-hook of replicas: torch makes a module's replicas one by one and only then joins them.
    """
    twins: dict[int, Any] = dict(zip(map(id, original.modules()), replica.modules(), strict=True))
    for head in original.modules():
        if isinstance(head, FusedLinear) and id(head._fused) in twins:
            twins[id(head)]._layer = (twins[id(head._fused)],)
