"""A simulated microservice system: load runs down a call graph, latency and errors run back up.

Every number comes from one `torch.Generator`; the same seed gives the same system. Requests enter at the
front services with a daily rhythm and reach the others along the calls, each with its own delay and fan-out.
A service's cpu follows its requests; its latency grows with its cpu and holds the latency of what it calls; a
share of its callees' errors becomes its own. So a fault shows most at its node, and weaker at its callers.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

METRICS = (
    "cpu_percent",
    "memory_mib",
    "requests_per_s",
    "latency_ms",
    "errors_percent",
    "net_in_kb",
    "net_out_kb",
)
FAULT_KINDS = ("cpu_hog", "memory_leak", "network_delay", "exceptions", "outage")
STEPS_PER_DAY = 288  # one row every five minutes
MAX_DELAY = 2  # steps that a change in load takes to reach a callee, at most
CALLER_SHARE_OF_ERRORS = 0.3
LOAD_NOISE, METRIC_NOISE = 0.08, 0.03


class Fault(NamedTuple):
    """One injected fault: rows start .. stop-1 of `node` are abnormal."""

    kind: str
    node: int
    start: int
    stop: int


@dataclass(frozen=True)
class System:
    """What `simulate` gives.

    values: (T, N, M) float32 in the units that `metrics` name. edge_index: (2, E) caller and callee.
    labels: (T, N) bool, True where that node itself has a fault. faults: in order of time. nodes: N names.
    """

    values: Tensor
    edge_index: Tensor
    labels: Tensor
    faults: tuple[Fault, ...]
    nodes: tuple[str, ...]
    metrics: tuple[str, ...] = METRICS


class _Calls(NamedTuple):
    """Edges with their requests per request of the caller and their delay; the tier of each node."""

    source: Tensor
    target: Tensor
    share: Tensor
    delay: Tensor
    tier: Tensor


def simulate(
    num_nodes: int = 200,
    num_steps: int = 5 * STEPS_PER_DAY,
    *,
    num_faults: int = 15,
    clean_share: float = 0.6,
    seed: int = 0,
) -> System:
    """Simulate a system of services for some time, one row every five minutes.

    Args:
        num_nodes: services; at least 2.
        num_steps: rows; at least 1.
        num_faults: how many faults are injected, of all kinds in turn, each at a node of its own while there
            are enough, one after another with a pause between.
        clean_share: of the rows, from the start, that stay without a fault.
        seed: of the generator that everything is drawn from.

    Raises:
        ValueError: too few nodes or rows, or more faults than the rest of the rows have room for.
    """
    if num_nodes < 2:
        raise ValueError(f"num_nodes must be at least 2, got {num_nodes}")
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    generator = torch.Generator().manual_seed(seed)
    calls = _draw_calls(num_nodes, generator)
    faults = _draw_faults(num_nodes, num_steps, num_faults, clean_share, generator)
    values = _run(calls, num_steps, faults, generator)
    labels = torch.zeros(num_steps, num_nodes, dtype=torch.bool)
    for fault in faults:
        labels[fault.start : fault.stop, fault.node] = True
    width = len(str(num_nodes - 1))
    names = tuple(f"service-{n:0{width}d}" for n in range(num_nodes))
    return System(values, torch.stack([calls.source, calls.target]), labels, faults, names)


def _uniform(size: int | tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return torch.empty(size, dtype=torch.float64).uniform_(low, high, generator=generator)


def _draw_calls(num_nodes: int, generator: torch.Generator) -> _Calls:
    """Draw a graph of tiers: every service but the front ones is called from the tier above, some twice."""
    num_tiers = min(2 + int(math.log2(num_nodes)), 7, num_nodes)
    num_fronts = max(1, num_nodes // 20)
    rest = torch.arange(num_nodes - num_fronts) * (num_tiers - 1) // max(num_nodes - num_fronts, 1) + 1
    tier = torch.cat([torch.zeros(num_fronts, dtype=torch.long), rest])
    sources, targets = [], []
    for level in range(1, int(tier.max()) + 1):
        above, here = (tier == level - 1).nonzero()[:, 0], (tier == level).nonzero()[:, 0]
        if above.numel() == 0 or here.numel() == 0:
            continue
        twice = here[_uniform(here.numel(), 0, 1, generator) < 0.6]
        target = torch.cat([here, twice])
        source = above[torch.randint(above.numel(), target.shape, generator=generator)]
        sources.append(source)
        targets.append(target)
    edges = torch.unique(torch.stack([torch.cat(sources), torch.cat(targets)]), dim=1)
    share = _uniform(edges.shape[1], 0.3, 1.2, generator)
    delay = torch.randint(0, MAX_DELAY + 1, (edges.shape[1],), generator=generator)
    return _Calls(edges[0], edges[1], share, delay, tier)


def _draw_faults(
    num_nodes: int, num_steps: int, num_faults: int, clean_share: float, generator: torch.Generator
) -> tuple[Fault, ...]:
    if num_faults < 1:
        return ()
    first = int(num_steps * clean_share)
    slot = (num_steps - first) // num_faults
    if slot < 8:
        raise ValueError(
            f"num_faults={num_faults} have no room in the last {num_steps - first} of {num_steps} rows:"
            " at least 8 rows each are needed"
        )
    nodes = torch.randperm(num_nodes, generator=generator).repeat(-(-num_faults // num_nodes))
    faults = []
    for k in range(num_faults):
        length = int(torch.randint(max(slot // 5, 3), max(slot // 2, 4), (), generator=generator))
        start = first + k * slot + int(torch.randint(1, slot - length, (), generator=generator))
        faults.append(Fault(FAULT_KINDS[k % len(FAULT_KINDS)], int(nodes[k]), start, start + length))
    return tuple(faults)


def _run(calls: _Calls, num_steps: int, faults: tuple[Fault, ...], generator: torch.Generator) -> Tensor:
    """Run the system: (T, N, M) float32."""
    num_nodes = calls.tier.numel()
    shape = (num_steps, num_nodes)
    strength = {kind: torch.zeros(shape, dtype=torch.float64) for kind in FAULT_KINDS}
    for fault in faults:
        size = float(_uniform(1, 0.7, 1.3, generator))
        strength[fault.kind][fault.start : fault.stop, fault.node] = size
        if fault.kind == "memory_leak":
            strength[fault.kind][fault.start : fault.stop, fault.node] *= torch.linspace(
                0.3, 1.0, fault.stop - fault.start, dtype=torch.float64
            )

    def noisy(share: float) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(share).add_(1)

    lost = strength["outage"].clamp(max=0.9)
    requests = _requests(calls, num_steps, 1 - lost, generator)
    usual = requests.mean(0)
    used = requests / usual * _uniform(num_nodes, 0.25, 0.45, generator)
    used = used * noisy(METRIC_NOISE) + 0.3 * strength["cpu_hog"] + 0.02
    busy = used.clamp(max=0.97)
    own_latency = _uniform(num_nodes, 2, 20, generator) * (0.6 + 0.4 / (1 - busy)) * noisy(METRIC_NOISE)
    own_latency = own_latency * (1 + 1.5 * strength["memory_leak"] + 2.5 * lost)
    own_latency = own_latency + 12 * strength["network_delay"]
    own_errors = _uniform(num_nodes, 0.1, 0.5, generator) * (1 + 2 * busy.pow(4)) * _bursts(shape, generator)
    own_errors = own_errors + 1.2 * strength["exceptions"] + 1.5 * lost
    latency, errors = _back_to_callers(calls, own_latency, own_errors)

    memory = _uniform(num_nodes, 200, 800, generator) * (1 + 0.15 * requests / usual) * noisy(0.01)
    memory = memory * (1 + 0.4 * strength["memory_leak"])
    sizes = _uniform((2, num_nodes), 0.5, 8, generator)
    net_in = requests * sizes[0] * noisy(METRIC_NOISE)
    net_out = requests * sizes[1] * (1 - 0.5 * errors / 100) * noisy(METRIC_NOISE)
    net_out = net_out * (1 - 0.4 * strength["exceptions"].clamp(max=1))
    columns = [100 * busy, memory, requests, latency, errors.clamp(0, 100), net_in, net_out]
    return torch.stack(columns, dim=-1).clamp_(min=0).float()


def _requests(calls: _Calls, num_steps: int, alive: Tensor, generator: torch.Generator) -> Tensor:
    """Requests per second of each service (T, N): a daily rhythm at the front, passed on tier by tier."""
    num_nodes = calls.tier.numel()
    time = torch.arange(num_steps, dtype=torch.float64)
    phase = 2 * math.pi * time / STEPS_PER_DAY
    rhythm = 1 - 0.5 * torch.cos(phase) - 0.15 * torch.cos(2 * phase + 0.7)
    fronts = (calls.tier == 0).nonzero()[:, 0]
    wander = _smooth_noise((num_steps, fronts.numel()), generator)
    requests = torch.zeros(num_steps, num_nodes, dtype=torch.float64)
    requests[:, fronts] = (
        _uniform(fronts.numel(), 40, 160, generator) * rhythm[:, None] * (1 + LOAD_NOISE * wander)
    )
    requests[:, fronts] *= alive[:, fronts]
    jitter = torch.randn(alive.shape, generator=generator, dtype=torch.float64) * METRIC_NOISE + 1
    for level in range(1, int(calls.tier.max()) + 1):
        here = calls.tier == level
        for delay in range(MAX_DELAY + 1):
            chosen = here[calls.target] & (calls.delay == delay)
            sent = requests[:, calls.source[chosen]] * calls.share[chosen]
            late = sent[(torch.arange(num_steps) - delay).clamp(min=0)]
            requests.index_add_(1, calls.target[chosen], late)
        requests[:, here] *= (alive * jitter)[:, here]
    return requests


def _smooth_noise(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Noise of unit variance that keeps its value for about an hour."""
    white = torch.randn(shape[0] + 12, shape[1], generator=generator, dtype=torch.float64)
    return white.unfold(0, 12, 1).mean(-1)[: shape[0]] * math.sqrt(12)


def _bursts(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Positive noise of median 1 with a long tail, as error rates have."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(0.35).exp_()


def _back_to_callers(calls: _Calls, latency: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Add to each caller what it waits for and a share of the errors it gets: (T, N) each."""
    latency, errors = latency.clone(), errors.clone()
    num_calls = torch.zeros(latency.shape[1], dtype=torch.float64)
    num_calls.index_add_(0, calls.source, torch.ones_like(calls.share))
    weight = 1 / num_calls[calls.source]
    for level in range(int(calls.tier.max()), 0, -1):
        chosen = calls.tier[calls.target] == level
        source, target = calls.source[chosen], calls.target[chosen]
        latency.index_add_(1, source, latency[:, target] * weight[chosen])
        errors.index_add_(1, source, errors[:, target] * weight[chosen] * CALLER_SHARE_OF_ERRORS)
    return latency, errors
