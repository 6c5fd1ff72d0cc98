"""Dense weight -> Monarch factors that reproduce the layer's outputs on the inputs it really gets.

With G = E[x x^H], the mean squared output error of M is tr((W - M) G (W - M)^H). Groups of inputs are
correlated, so the blocks are no longer independent. Three steps: whiten each input group by the Cholesky
factor of its own part of G and truncate; then solve for all left factors of an output group together (the
joint step, least squares); then go through the input groups again and again, each given the others (block
Gauss-Seidel). Every step lowers the error.
"""

from collections.abc import Iterable, Sequence
from math import prod, sqrt

import torch
from torch import Tensor

from . import _projection_blocks as blocks

_DAMPING = 1e-8  # of the mean variance, added to every one: inputs that never vary leave G singular
_STOP = 1e-3  # relative gain of a sweep that is not worth another


def gram_of(calibration: Tensor | Iterable[Tensor], in_features: int) -> Tensor:
    """E[x x^H] over every token of one tensor (*, in_features), or of an iterable of them; float64."""
    total: Tensor | None = None
    tokens = 0
    for x in [calibration] if isinstance(calibration, Tensor) else calibration:
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != in_features:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"calibration: inputs must be (*, {in_features}), got {got}")
        rows = x.detach().reshape(-1, in_features)
        part = blocks.gram(rows.mT, of_rows=True)
        total = part if total is None else total + part
        tokens += rows.shape[0]
    if total is None or tokens == 0:
        raise ValueError("calibration: it gave no inputs")
    return total / tokens


def output_energy(weight: Tensor, gram: Tensor) -> float:
    """E|W x|^2 = tr(W G W^H), a slice of rows at a time."""
    total = 0.0
    for part in weight.split(max(1, (4 << 20) // max(1, weight.shape[1]))):
        part = part.to(gram.dtype)
        total += float(((part @ gram) * part.conj()).sum().real)
    return total


class OutputFit:
    """One weight, one grid and one Gram matrix, fitted at any rank."""

    def __init__(
        self, weight: Tensor, gram: Tensor, in_dims: Sequence[int], out_dims: Sequence[int], grouping: str
    ) -> None:
        self.in_dims, self.out_dims, self.grouping = tuple(in_dims), tuple(out_dims), grouping
        (i0, i1), (o0, o1) = in_dims, out_dims
        order = torch.arange(i0 * i1, device=weight.device)
        if grouping == "strided":
            order = order.view(i0, i1).T.flatten()
        dtype = blocks.wide(weight.dtype)
        features = i0 * i1
        gram = blocks.padded(gram.to(dtype), features, features)[order][:, order]
        variance = gram.diagonal().real.mean().clamp_min(torch.finfo(torch.float64).tiny)
        self.gram = gram + _DAMPING * variance * torch.eye(features, dtype=dtype, device=weight.device)
        self.weight = blocks.padded(weight, o0 * o1, features)
        self.order = order
        diagonal = self.gram.view(i1, i0, i1, i0).diagonal(dim1=0, dim2=2).movedim(-1, 0)
        self.roots = torch.linalg.cholesky(diagonal)  # (i1, i0, i0)

    def energies(self) -> Tensor:
        """Squared singular values of the whitened blocks, summed over them: (shorter side)."""
        (i0, i1), (o0, o1) = self.in_dims, self.out_dims
        total = torch.zeros(min(i0, o1), dtype=torch.float64, device=self.weight.device)
        for part in blocks.chunks(o0, o1 * i0 * i1):
            total += blocks.energies(self._whitened(self._rows(part))).sum((0, 1))
        return total

    def fit(self, rank: int, sweeps: int = 4) -> tuple[list[Tensor], float]:
        """The factors, and the mean squared output error that they leave."""
        (i0, i1), (o0, o1) = self.in_dims, self.out_dims
        first = self.weight.new_zeros((i1, i0, o0, rank), dtype=self.gram.dtype)
        second = self.weight.new_zeros((o0, rank * i1, o1), dtype=self.gram.dtype)
        loss = 0.0
        for part in blocks.chunks(o0, 2 * o1 * i0 * i1):
            left, right, part_loss = self._fit_groups(self._rows(part), rank, sweeps)
            left, right = blocks.balance(left, right)
            first[:, :, part] = right.permute(1, 3, 0, 2)
            second[part] = left.permute(0, 3, 1, 2).flatten(1, 2)
            loss += part_loss
        return [first.flatten(2), second], loss

    def _rows(self, part: slice) -> Tensor:
        """The weight of some output groups, (groups, o1, features) in the order of the blocks."""
        o1 = self.out_dims[1]
        rows = self.weight[part.start * o1 : part.stop * o1][:, self.order]
        return rows.to(self.gram.dtype).view(-1, o1, rows.shape[1])

    def _whitened(self, weight: Tensor) -> Tensor:
        i0, i1 = self.in_dims
        return weight.view(*weight.shape[:2], i1, i0).transpose(1, 2) @ self.roots

    def _unwhiten(self, right: Tensor, group: int | None = None) -> Tensor:
        roots = self.roots if group is None else self.roots[group]
        return torch.linalg.solve_triangular(roots, right, upper=False, left=False)

    def _fit_groups(self, weight: Tensor, rank: int, sweeps: int) -> tuple[Tensor, Tensor, float]:
        """U (groups, i1, o1, R), V (groups, i1, R, i0) and the loss of some output groups."""
        target = weight @ self.gram
        left, right = blocks.truncate(self._whitened(weight), rank)
        right = self._unwhiten(right)
        best = (left, right, self._loss(weight, target, left, right)[0])
        if self.in_dims[1] == 1:  # one input group: whitening made it exact
            return best
        left = self._joint(target, right)
        loss, error = self._loss(weight, target, left, right)
        best = min(best, (left, right, loss), key=lambda b: b[2])
        for _ in range(sweeps):
            before = best[2]
            left, right = self._sweep(error, left.clone(), right.clone())
            left = self._joint(target, right)
            loss, error = self._loss(weight, target, left, right)
            best = min(best, (left, right, loss), key=lambda b: b[2])
            if before - best[2] < _STOP * before:
                break
        return best

    def _times_gram(self, right: Tensor) -> Tensor:
        """V_b G[b, :] for every input group b: (groups, i1, R, features)."""
        i0, i1 = self.in_dims
        return right @ self.gram.view(i1, i0, -1)

    def _joint(self, target: Tensor, right: Tensor) -> Tensor:
        """All left factors of an output group at once: U = W G B^H (B G B^H)^-1, B the stacked V."""
        groups, i1, rank, i0 = right.shape
        seen = self._times_gram(right).reshape(groups, i1 * rank, i1, i0)
        square = torch.einsum("gnbi,gbri->gnbr", seen, right.conj()).reshape(groups, i1 * rank, i1 * rank)
        cross = torch.einsum("gobi,gbri->gobr", target.view(groups, -1, i1, i0), right.conj())
        cross = cross.reshape(groups, -1, i1 * rank)
        size = square.diagonal(dim1=-2, dim2=-1).real.mean(-1)[:, None, None]
        eye = torch.eye(i1 * rank, dtype=square.dtype, device=square.device)
        square = square + 1e-12 * torch.where(size > 0, size, torch.ones_like(size)) * eye
        solved = torch.linalg.solve(square.mT, cross.mT).mT  # U square = cross
        return solved.view(groups, -1, i1, rank).transpose(1, 2)

    def _loss(self, weight: Tensor, target: Tensor, left: Tensor, right: Tensor) -> tuple[float, Tensor]:
        """The loss and (W - M) G."""
        difference = weight - (left @ right).transpose(1, 2).flatten(2)
        seen = self._times_gram(right).flatten(1, 2)
        error = target - left.transpose(1, 2).flatten(2) @ seen
        return float((error * difference.conj()).sum().real), error

    def _sweep(self, error: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Fit every input group again, given all the others."""
        i0, i1 = self.in_dims
        for b in range(i1):
            columns = slice(b * i0, (b + 1) * i0)
            root = self.roots[b]
            # (M_b + E G_b G_bb^-1) L = M_b L + E G_b L^-H
            residual = torch.linalg.solve_triangular(root.mH, error[..., columns], upper=True, left=False)
            u, v = blocks.truncate(left[:, b] @ (right[:, b] @ root) + residual, right.shape[2])
            v = self._unwhiten(v, b)
            change_u = torch.cat([u, -left[:, b]], -1)
            change_v = torch.cat([v, right[:, b]], -2)
            error = error - change_u @ (change_v @ self.gram[columns])
            left[:, b], right[:, b] = u, v
        return left, right


def output_error(weight: Tensor, dense: Tensor, gram: Tensor) -> float:
    """Relative root mean square of (W - M) x."""
    whole = output_energy(weight, gram)
    difference = weight.to(gram.dtype) - dense.to(gram.dtype)
    return sqrt(max(output_energy(difference, gram), 0.0) / whole) if whole > 0 else 0.0


def parameters_of(in_dims: Sequence[int], out_dims: Sequence[int], rank: int) -> int:
    """How many numbers the factors hold."""
    last = len(in_dims) - 1
    return sum(
        prod(out_dims[:k])
        * prod(in_dims[k + 1 :])
        * in_dims[k]
        * out_dims[k]
        * (rank if k > 0 else 1)
        * (rank if k < last else 1)
        for k in range(len(in_dims))
    )
