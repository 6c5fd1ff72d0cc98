"""MonarchLinear: a dense linear map replaced by a product of block-diagonal factors."""

from collections.abc import Iterable, Sequence
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import _monarch_ops, ops

if TYPE_CHECKING:
    from ._projection import Projection


class MonarchLinear(nn.Module):
    """Apply ``x @ M.T + bias`` with a Monarch matrix M, a product of ``len(in_dims)`` block-diagonal factors.

    With two dims M is a grid of out_dims[0] x in_dims[1] blocks of rank ``rank``. The dims (in_features, 1)
    and (1, out_features) make one block, a plain low-rank matrix; a rank of ``min(in_dims[0], out_dims[1])``
    is dense. See `fastlayers.ops.monarch_linear` for the formula.

    Args:
        in_features, out_features: as for ``nn.Linear``.
        in_dims, out_dims: two or more sizes on each side. Where their product exceeds the features, the
            features beyond are zeros that are neither read nor computed, so prime sizes work.
        bias: as for ``nn.Linear``.
        checkpoint: accepted for code written for gradient checkpointing. It changes nothing: the backward
            always computes the values between the factors again, and none of them is ever kept.
        rank: rank of each block; with three or more dims, of each bond between two factors.
        grouping: which input features share a block: "strided" (features ``prod(in_dims[1:])`` apart) or
            "contiguous" (neighbours). The two are different matrices for the same numbers, so the grouping is
            part of the state dict, and loading the other one is refused.
        init: "linear" draws the factors so that the output has the variance that ``nn.Linear`` gives, a third
            of the input's; "mup" draws each by its own sizes, see `lr_multipliers`.
        device, dtype: of the parameters, as for ``nn.Linear``.

    Attributes:
        weights: the factors, [prod(out_dims[:k]) * prod(in_dims[k+1:]), r_k * in_dims[k],
            out_dims[k] * r_(k+1)] with r_0 = r_N = 1 and ``rank`` between.
        bias: (out_features,), or None.
        projection: how the layer was obtained from a dense one and with which error; None when it was not.

    Input (*, in_features), result (*, out_features), contiguous. Rank 1 and "strided" are the layout of the
    MonarchLinear that circulates as a public-domain gist, whose checkpoints load.

    Raises:
        ValueError: dims that differ in number or whose product does not reach the features; an unknown
            grouping or init.
    """

    weights: nn.ParameterList
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        in_dims: Sequence[int],
        out_dims: Sequence[int],
        bias: bool = True,
        checkpoint: bool = False,
        rank: int = 1,
        grouping: str = "strided",
        init: str = "linear",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(in_features, out_features, in_dims, out_dims, rank)
        for name, value, known in (("grouping", grouping, _monarch_ops.GROUPINGS), ("init", init, _INITS)):
            if value not in known:
                choices = " or ".join(f'"{k}"' for k in known)
                raise ValueError(f"MonarchLinear: {name} must be {choices}, got {value!r}")
        self.in_features, self.out_features = in_features, out_features
        self.in_dims, self.out_dims = tuple(in_dims), tuple(out_dims)
        self.checkpoint, self.rank, self.grouping, self.init = checkpoint, rank, grouping, init
        self.projection: Projection | None = None
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            for shape in weight_shapes(in_dims, out_dims, rank)
        )
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        in_dims: Sequence[int] | None = None,
        out_dims: Sequence[int] | None = None,
        rank: int | None = None,
        params: float | None = None,
        weight_tolerance: float | None = None,
        output_tolerance: float | None = None,
        calibration: "Tensor | Iterable[Tensor] | None" = None,
        gram: Tensor | None = None,
        grouping: str | None = "strided",
    ) -> "MonarchLinear":
        """The Monarch layer nearest to a dense one; lossy, see ``.projection`` of the result for how much.

        Args:
            linear: left as it is; its bias, dtype, device and ``requires_grad`` carry over.
            in_dims, out_dims: the dims; without them every grid of 1 to 64 output and input groups is tried,
                plain low rank among them, and the least error among the nearly fastest taken.
            rank, params, weight_tolerance, output_tolerance: one of them sets the rank. ``params``: the
                largest that keeps this share of the dense weight's parameters. A tolerance: the least whose
                relative error, of the weight (Frobenius) or of the output (root mean square over the
                calibration inputs), is at most this. With dims and none of them: 1.
            calibration: inputs of the layer, (*, in_features), as one tensor or an iterable. The layer then
                reproduces the outputs on these inputs and no longer the weight (two dims only; with
                more, and with ``weight_tolerance``, they serve to measure).
            gram: instead of calibration, the mean of x x^H over them, (in_features, in_features).
            grouping: "strided", "contiguous", or None for the better.

        Without calibration, two dims give the global optimum and more give one within sqrt(N - 1) of it,
        lowered by sweeps; ``.projection.best_possible`` bounds what any factors could reach. Computed in
        float64.

        Raises:
            TypeError: linear is no ``nn.Linear``.
            ValueError: arguments that contradict each other, or a share of parameters that no layer keeps.
        """
        from ._projection import project

        return project(
            linear,
            in_dims=in_dims,
            out_dims=out_dims,
            rank=rank,
            params=params,
            weight_tolerance=weight_tolerance,
            output_tolerance=output_tolerance,
            calibration=calibration,
            gram=gram,
            grouping=grouping,
        )

    def reset_parameters(self) -> None:
        """Draw the factors as ``init`` says, and the bias as ``nn.Linear`` does."""
        # A product of N factors has the variance of the product. Zeros of the padding carry no variance.
        padding = (prod(self.in_dims) / self.in_features) ** (0.5 / len(self.in_dims))
        gain = 3.0 ** (-0.5 / len(self.in_dims)) * padding
        for weight in self.weights:
            _, fan_in, fan_out = weight.shape
            std = min(1.0, sqrt(fan_out / fan_in)) if self.init == "mup" else gain
            bound = sqrt(3.0) * std / sqrt(fan_in)
            nn.init.uniform_(weight, -bound, bound)
        if self.bias is not None:
            bound = 1.0 / sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map (*, in_features) to (*, out_features)."""
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != self.in_features:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"MonarchLinear: x must be (*, in_features) = (*, {self.in_features}), got {got}"
            )
        return ops.monarch_linear(
            x,
            list(self.weights),
            self.bias,
            in_dims=self.in_dims,
            out_dims=self.out_dims,
            out_features=self.out_features,
            grouping=self.grouping,
        )

    def to_dense(self) -> Tensor:
        """The matrix M, (out_features, in_features), differentiable."""
        first = self.weights[0]
        identity = torch.eye(self.in_features, dtype=first.dtype, device=first.device)
        rows = ops.monarch_linear(
            identity,
            list(self.weights),
            in_dims=self.in_dims,
            out_dims=self.out_dims,
            out_features=self.out_features,
            grouping=self.grouping,
        )
        return rows.T.contiguous()

    def to_linear(self) -> nn.Linear:
        """A dense ``nn.Linear`` that computes the same, with parameters of its own."""
        first = self.weights[0]
        linear = nn.utils.skip_init(
            nn.Linear,
            self.in_features,
            self.out_features,
            self.bias is not None,
            device=first.device,
            dtype=first.dtype,
        )
        with torch.no_grad():
            linear.weight.copy_(self.to_dense())
            if self.bias is not None:
                linear.bias.copy_(self.bias)
                linear.bias.requires_grad_(self.bias.requires_grad)
        linear.weight.requires_grad_(any(w.requires_grad for w in self.weights))
        return linear.train(self.training)

    @property
    def parameters_saved(self) -> int:
        """How many parameters fewer than the dense layer (below zero: more)."""
        return self.in_features * self.out_features - sum(w.numel() for w in self.weights)

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of the forward for one token, without the bias."""
        return _monarch_ops.flops_per_token([w.shape for w in self.weights])

    @property
    def lr_multipliers(self) -> tuple[float, ...]:
        """Learning rate of each factor under "mup", relative to the dense layer's rate.

        ``in_features / (fan_in_k * N)``. Source: Qiu et al., "Compute better spent: replacing dense layers
        with structured matrices", 2024.
        """
        return tuple(self.in_features / (w.shape[1] * len(self.weights)) for w in self.weights)

    def extra_repr(self) -> str:
        share = 1.0 - self.parameters_saved / (self.in_features * self.out_features)
        blocks = f"{prod(self.out_dims[:-1])} x {prod(self.in_dims[1:])} blocks of rank {self.rank}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, in_dims={self.in_dims},"
            f" out_dims={self.out_dims}, bias={self.bias is not None}, rank={self.rank},"
            f" grouping={self.grouping!r}; {blocks}, {share:.2%} of the dense weight"
        )

    def get_extra_state(self) -> Tensor:
        """The grouping, as an index into ("strided", "contiguous")."""
        return torch.tensor(_monarch_ops.GROUPINGS.index(self.grouping), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing to set: `_load_from_state_dict` has compared the grouping already."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load, or refuse a checkpoint of the other grouping and change nothing."""
        key = prefix + "_extra_state"
        stored = state_dict.get(key)
        grouping = "strided" if stored is None else _monarch_ops.GROUPINGS[int(stored)]
        if prefix + "weights.0" in state_dict:
            if grouping != self.grouping:
                found = (
                    "names no grouping, so it is of the published layer," if stored is None else "was saved"
                )
                error_msgs.append(
                    f'MonarchLinear {prefix[:-1]!r}: the checkpoint {found} with grouping "{grouping}",'
                    f' but the layer has "{self.grouping}": build it with grouping="{grouping}"'
                )
                # The factors load after this, in a module of their own: give them what they have.
                state_dict |= {prefix + name: value.detach() for name, value in self.named_parameters()}
            state_dict[key] = self.get_extra_state()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


_INITS = ("linear", "mup")


def weight_shapes(in_dims: Sequence[int], out_dims: Sequence[int], rank: int) -> list[tuple[int, int, int]]:
    """Shapes of the factors: [prod(out_dims[:k]) * prod(in_dims[k+1:]), r_k * in_k, out_k * r_(k+1)]."""
    last = len(in_dims) - 1
    return [
        (
            prod(out_dims[:k]) * prod(in_dims[k + 1 :]),
            in_dims[k] * (rank if k > 0 else 1),
            out_dims[k] * (rank if k < last else 1),
        )
        for k in range(len(in_dims))
    ]


def _check_sizes(
    in_features: int, out_features: int, in_dims: Sequence[int], out_dims: Sequence[int], rank: int
) -> None:
    for name, size in (("in_features", in_features), ("out_features", out_features), ("rank", rank)):
        if size < 1:
            raise ValueError(f"MonarchLinear: {name} must be at least 1, got {size}")
    for name, dims in (("in_dims", in_dims), ("out_dims", out_dims)):
        if not isinstance(dims, Iterable):
            raise TypeError(f"MonarchLinear: {name} must be a sequence of sizes, got {dims!r}")
    _monarch_ops.check_dims("MonarchLinear", in_dims, out_dims)
    sides = (("in", in_features, in_dims), ("out", out_features, out_dims))
    for side, features, dims in sides:
        if prod(dims) < features:
            raise ValueError(
                f"MonarchLinear: the product of {side}_dims {tuple(dims)} must reach"
                f" {side}_features = {features}, got {prod(dims)}"
            )
