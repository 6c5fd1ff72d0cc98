"""A budget of parameters for several layers, spread by the error that each parameter saves."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from .._projection_data import parameters_of
from .._projection_search import Choice, Errors, largest_rank, search

_MOST_PARAMETERS = 0.8  # of one dense layer's
_STEPS = 64  # a layer's ranks are tried in about this many steps


@dataclass(frozen=True)
class Wish:
    """A dense weight that is to be replaced, with the Gram matrix of its inputs where that is known."""

    path: str
    weight: Tensor
    gram: Tensor | None


def spread(
    wishes: Sequence[Wish],
    share: float,
    dims: tuple[Sequence[int], Sequence[int]] | None,
    groupings: Sequence[str],
) -> dict[str, Choice]:
    """Sizes of all layers that together keep `share` of their dense parameters.

    Each layer's grid is the best one at the share itself; ranks then grow where the squared relative error
    falls most per parameter. A layer that not even rank 1 brings under the share is left out, and so is its
    part of the budget.
    """
    chosen: dict[str, Choice] = {}
    errors: dict[str, Errors] = {}
    budget = 0.0
    for wish in wishes:
        found = search(wish.weight, wish.gram, dims, groupings, most_parameters=share * wish.weight.numel())
        if not found:
            continue
        best = found[0]
        budget += share * wish.weight.numel()
        errors[wish.path] = Errors(wish.weight, wish.gram, best.in_dims, best.out_dims, best.grouping)
        chosen[wish.path] = best
    if len(chosen) < 2 or any(len(c.in_dims) > 2 for c in chosen.values()):
        return chosen
    weights = {wish.path: wish.weight for wish in wishes}
    return _grow(chosen, errors, {path: weights[path].numel() for path in chosen}, budget)


def _grow(
    chosen: dict[str, Choice], errors: dict[str, Errors], dense: dict[str, int], budget: float
) -> dict[str, Choice]:
    """Start every layer at rank 1 and give out the budget, the best step first."""
    now = {path: _at(choice, 1, errors[path]) for path, choice in chosen.items()}
    left = budget - sum(choice.parameters for choice in now.values())
    queue: list[tuple[float, str, Choice]] = []

    def offer(path: str) -> None:
        choice = now[path]
        most = largest_rank(choice.in_dims, choice.out_dims)
        rank = min(choice.rank + max(1, most // _STEPS), most)
        larger = parameters_of(choice.in_dims, choice.out_dims, rank)
        if rank == choice.rank or larger > _MOST_PARAMETERS * dense[path]:
            return
        step = _at(choice, rank, errors[path])
        gain = (choice.error**2 - step.error**2) / (larger - choice.parameters)
        heapq.heappush(queue, (-gain, path, step))

    for path in now:
        offer(path)
    while queue:
        _, path, step = heapq.heappop(queue)
        cost = step.parameters - now[path].parameters
        if cost <= left:
            left -= cost
            now[path] = step
            offer(path)
    return now


def _at(choice: Choice, rank: int, errors: Errors) -> Choice:
    return replace(choice, rank=rank, error=errors.of(rank))
