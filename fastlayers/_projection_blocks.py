"""Best low-rank approximation of many blocks at once, in float64, by the Gram matrix of the shorter side.

The top eigenvectors V of the Gram matrix span the best subspace; U = A V^H then projects A on it, which keeps
the result exact to rounding also where the error is tiny. A full SVD of every block takes six times as long.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_CHUNK_BYTES = 32 << 20  # of float64 blocks that are worked on at a time


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that projections are computed in: float64, or complex128."""
    return torch.complex128 if dtype.is_complex else torch.float64


def grid(weight: Tensor, in_dims: Sequence[int], out_dims: Sequence[int], grouping: str) -> Tensor:
    """View a padded weight as two-dim blocks (o0, i1, o1, i0)."""
    (i0, i1), (o0, o1) = in_dims, out_dims
    if grouping == "contiguous":
        return weight.view(o0, o1, i1, i0).permute(0, 2, 1, 3)
    return weight.view(o0, o1, i0, i1).permute(0, 3, 1, 2)


def padded(weight: Tensor, rows: int, columns: int) -> Tensor:
    """The weight, with zeros to (rows, columns); itself where it has that size."""
    if weight.shape == (rows, columns):
        return weight
    return torch.nn.functional.pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))


def gram(block: Tensor, of_rows: bool) -> Tensor:
    """A A^H or A^H A of blocks (*, rows, columns), widened a slice at a time."""
    block = block if of_rows else block.mT
    dtype = wide(block.dtype)
    result = block.new_zeros((*block.shape[:-1], block.shape[-2]), dtype=dtype)
    for part in _slices(block, -1):
        part = part.to(dtype)
        result += part @ part.mH
    return result if of_rows else result.conj()


def residual(block: Tensor, left: Tensor, right: Tensor) -> float:
    """Squared Frobenius norm of A - U V, for the U = A V^H that `truncate` gives."""
    whole = sum(float(torch.linalg.vector_norm(a.to(left.dtype)).square()) for a in _slices(block, -2))
    rest = whole - float(torch.linalg.vector_norm(left).square())
    if rest > 1e-6 * whole:  # Pythagoras; below, rounding would show
        return rest
    parts = zip(_slices(block, -2), _slices(left, -2, like=block), strict=True)
    return sum(float(torch.linalg.vector_norm(a.to(u.dtype) - u @ right).square()) for a, u in parts)


def widened(block: Tensor) -> Tensor:
    """The blocks in float64, one after another in memory, where that fits the working memory."""
    if block.numel() * 8 > 2 * _CHUNK_BYTES:
        return block
    return block.to(wide(block.dtype), memory_format=torch.contiguous_format)


def _slices(block: Tensor, dim: int, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Parts along a dimension whose float64 copies stay within the working memory."""
    like = block if like is None else like
    return block.split(max(1, _CHUNK_BYTES * like.shape[dim] // (8 * max(1, like.numel()))), dim)


def energies(block: Tensor) -> Tensor:
    """Squared singular values of blocks (*, rows, columns), largest first: (*, shorter side), float64."""
    of_rows = block.shape[-2] <= block.shape[-1]
    return torch.linalg.eigvalsh(gram(block, of_rows)).clamp_min(0).flip(-1)


def truncate(block: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U (*, rows, R) and V (*, R, columns) with U V the best approximation of rank R; V's rows orthonormal.

    Beyond the shorter side U is zero, and so is V.
    """
    rows, columns = block.shape[-2:]
    kept = min(rank, rows, columns)
    of_rows = rows < columns
    _, vectors = torch.linalg.eigh(gram(block, of_rows))
    top = vectors[..., vectors.shape[-1] - kept :].flip(-1)
    if of_rows:  # U is orthonormal; turn U (U^H A) round so that the right factor is
        coefficients = torch.cat([top.mH @ part.to(top.dtype) for part in _slices(block, -1)], -1)
        norms = torch.linalg.vector_norm(coefficients, dim=-1, keepdim=True)
        safe = torch.where(norms > 0, norms, torch.ones_like(norms))
        left, right = top * norms.mT, coefficients / safe
    else:
        right = top.mH
        left = torch.cat([part.to(top.dtype) @ top for part in _slices(block, -2)], -2)
    if kept < rank:
        left = torch.nn.functional.pad(left, (0, rank - kept))
        right = torch.nn.functional.pad(right, (0, 0, 0, rank - kept))
    return left, right


def balance(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each pair of a column of U and a row of V to equal norms, as training likes them."""
    a = torch.linalg.vector_norm(left, dim=-2)
    b = torch.linalg.vector_norm(right, dim=-1)
    ratio = torch.where((a > 0) & (b > 0), (b / a).sqrt(), torch.ones_like(a))
    return left * ratio.unsqueeze(-2), right / ratio.unsqueeze(-1)


def chunks(count: int, elements_each: int) -> Iterator[slice]:
    """Slices of `count` blocks that stay within the working memory."""
    step = max(1, _CHUNK_BYTES // (8 * max(1, elements_each)))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def in_threads(work: Callable[[slice], None], parts: Iterable[slice]) -> None:
    """Run `work` on every slice, in as many threads as torch uses: LAPACK takes one block after another."""
    slices = list(parts)
    threads = min(torch.get_num_threads(), len(slices))
    if threads <= 1:
        for part in slices:
            work(part)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, slices))
