"""The simulated system is reproducible, and its faults are where its labels say."""

import pytest
import torch

from models.topomad.simulate import FAULT_KINDS, METRICS, STEPS_PER_DAY, simulate


@pytest.fixture(scope="module")
def system():
    return simulate(40, 1200, num_faults=10, seed=3)


def test_the_seed_decides_everything_and_the_global_state_is_left_alone(system):
    state = torch.random.get_rng_state()
    again, other = (simulate(40, 1200, num_faults=10, seed=seed) for seed in (3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(again.values, system.values) and again.faults == system.faults
    assert torch.equal(again.edge_index, system.edge_index)
    assert not torch.equal(other.values, system.values) and other.faults != system.faults


def test_shapes_and_ranges(system):
    assert system.values.shape == (1200, 40, len(METRICS)) and system.values.dtype == torch.float32
    assert system.values.isfinite().all() and (system.values >= 0).all()
    for name in ("cpu_percent", "errors_percent"):
        assert system.values[..., METRICS.index(name)].max() <= 100
    assert len(system.nodes) == len(set(system.nodes)) == 40


def test_the_call_graph_has_no_cycle_and_reaches_every_service(system):
    source, target = system.edge_index
    assert (source < target).all()
    fronts = 40 // 20
    assert set(target.tolist()) == set(range(fronts, 40))


def test_labels_are_the_faults(system):
    assert {fault.kind for fault in system.faults} == set(FAULT_KINDS)
    assert not system.labels[: int(0.6 * 1200)].any()
    labels = torch.zeros_like(system.labels)
    for fault in system.faults:
        assert labels[fault.start : fault.stop].sum() == 0, "faults overlap"
        labels[fault.start : fault.stop, fault.node] = True
    assert torch.equal(labels, system.labels)


def test_a_fault_changes_its_node_and_ends(system):
    clean = simulate(40, 1200, num_faults=0, seed=3)
    assert not clean.labels.any() and clean.faults == ()
    usual = system.values[:720]
    for fault in system.faults:
        scaled = (system.values - usual.mean(0)) / usual.std(0)
        during = scaled[fault.start : fault.stop, fault.node].abs().mean(0).max()
        after = scaled[fault.stop + 1 : fault.stop + 5, fault.node].abs().mean(0).max()
        assert during > 1.2 * scaled[:720, fault.node].abs().mean(0).max(), fault
        assert during > after, fault


def test_load_has_a_daily_rhythm_that_reaches_the_last_service(system):
    requests = system.values[: 2 * STEPS_PER_DAY, :, METRICS.index("requests_per_s")]
    requests = (requests - requests.mean(0)) / requests.std(0)
    next_day = (requests[:STEPS_PER_DAY] * requests[STEPS_PER_DAY:]).mean(0)
    half_day = (requests[: STEPS_PER_DAY // 2] * requests[STEPS_PER_DAY // 2 : STEPS_PER_DAY]).mean(0)
    assert (next_day > 0.5).all() and (half_day < 0).all()


@pytest.mark.parametrize("num_nodes", [2, 3, 7])
def test_small_systems(num_nodes):
    system = simulate(num_nodes, 100, num_faults=2)
    assert system.values.shape == (100, num_nodes, len(METRICS)) and system.values.isfinite().all()


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="num_nodes must be at least 2, got 1"):
        simulate(1)
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        simulate(2, 0)
    with pytest.raises(ValueError, match="num_faults=9 have no room in the last 40 of 100 rows"):
        simulate(2, 100, num_faults=9)
