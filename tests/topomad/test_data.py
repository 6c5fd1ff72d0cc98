"""Metrics and topologies are read from what users have, or refused with the place that is wrong."""

import numpy as np
import pandas as pd
import pytest
import torch
from shared_data import shared_path

from models.topomad.data import Scaler, read_edges, read_metrics

NODES, METRICS = ("a", "b", "c"), ("cpu", "mem")


@pytest.fixture
def values():
    return np.random.default_rng(0).normal(size=(5, 3, 2)).astype("float32")


@pytest.fixture
def frame(values):
    columns = pd.MultiIndex.from_product([NODES, METRICS], names=["node", "metric"])
    return pd.DataFrame(values.reshape(5, 6), columns=columns, index=pd.RangeIndex(5, name="time"))


def test_every_form_gives_the_same(values, frame, tmp_path):
    long = frame.stack([0, 1]).rename("value").reset_index()
    frame.to_csv(tmp_path / "wide.csv")
    frame.to_csv(tmp_path / "wide.csv.gz")
    long.to_csv(tmp_path / "long.csv", index=False)
    before = frame.copy()
    shuffled = frame.iloc[:, [5, 0, 3, 2, 1, 4]]
    forms = [values, torch.from_numpy(values), frame, shuffled, long, long.iloc[::-1]]
    forms += [tmp_path / name for name in ("wide.csv", "wide.csv.gz", "long.csv")]
    for form in forms:
        read = read_metrics(form, nodes=NODES, metrics=METRICS)
        assert (read.nodes, read.metrics) == (NODES, METRICS)
        assert np.allclose(read.values.numpy(), values, rtol=1e-6)
    read_metrics(frame).values.zero_()
    pd.testing.assert_frame_equal(frame, before)


def test_the_two_header_csv_of_online_boutique():
    read = read_metrics(shared_path("data/nezha_online_boutique/metrics-2022-08-22.csv.gz"))
    assert read.values.shape == (1209, 10, 19)
    edges = read_edges(shared_path("data/nezha_online_boutique/edges.csv"), read.nodes)
    assert edges.shape == (2, 14)


def test_bad_metrics_are_refused(values, frame):
    def message(data, **names):
        with pytest.raises(ValueError) as caught:
            read_metrics(data, **names)
        return str(caught.value)

    assert "X must be (T, N, M), none of them 0, got (5, 3)" in message(values[..., 0])
    assert "X has 3 nodes, but 2 names of nodes are known" in message(values, nodes=["a", "b"])
    twice = frame.iloc[:, [0, 1, 2, 3, 4, 5, 0]]
    assert "X has columns twice: ('a', 'cpu')" in message(twice)
    assert "every metric for every node; missing: ('c', 'mem')" in message(frame.iloc[:, :5])
    assert "two levels of columns, node and metric, or the columns time" in message(frame["a"])
    infinite = values.copy()
    infinite[3, 1, 0] = np.inf
    assert "X has 1 infinite values, the first in row 3 of (node-1, metric-0)" in message(infinite)
    text = frame.astype(object)
    text.iloc[0, 0] = "high"
    assert "these columns do not: ('a', 'cpu')" in message(text)
    long = frame.stack([0, 1]).rename("value").reset_index()
    assert "X has (a, cpu) twice at 0" in message(pd.concat([long, long.iloc[:1]]))
    other = frame.rename(columns={"b": "x"}, level=0)
    assert "missing ['b'], unknown ['x']" in message(other, nodes=NODES, metrics=METRICS)
    with pytest.raises(TypeError, match=r"X must be a .* array, a frame or a CSV file, got list"):
        read_metrics([1, 2])


def test_edges(tmp_path):
    expected = torch.tensor([[0, 1], [2, 0]])
    pd.DataFrame({"source": ["a", "b"], "target": ["c", "a"]}).to_csv(tmp_path / "edges.csv", index=False)
    for form in ([("a", "c"), ("b", "a")], expected, expected.numpy(), tmp_path / "edges.csv"):
        assert torch.equal(read_edges(form, NODES), expected)
    assert read_edges(None, NODES).shape == (2, 0)
    with pytest.raises(ValueError, match="edges name nodes that X does not have: d, e"):
        read_edges([("a", "e"), ("d", "b")], NODES)
    with pytest.raises(ValueError, match="edges must name nodes from 0 to 2, got 3"):
        read_edges(torch.tensor([[0], [3]]), NODES)
    with pytest.raises(ValueError, match=r"edges must be \(2, E\) whole numbers, got \(2, 3\) torch.float32"):
        read_edges(torch.zeros(2, 3), NODES)
    with pytest.raises(ValueError, match=r"a pickle can run any code.*columns source and target"):
        read_edges(tmp_path / "topology.pkl", NODES)
    with pytest.raises(ValueError, match=r"must have the columns source and target, got \['from', 'to'\]"):
        read_edges(pd.DataFrame({"from": [], "to": []}), NODES)


def test_scaling_fills_from_the_past_and_shows_changes_of_constants():
    values = torch.tensor([[1.0, 5.0], [3.0, 5.0], [float("nan"), 5.0], [5.0, 5.0]])[:, None]
    scaler = Scaler.fit(read_metrics(values), clip=10.0)
    scaled, observed = scaler.transform(values)
    assert scaled[2, 0, 0] == scaled[1, 0, 0] and not observed[2, 0, 0] and observed.sum() == 7
    assert torch.allclose(scaled[[0, 1, 3], 0, 0].square().mean(), torch.tensor(1.0))
    assert (scaled[..., 1] == 0).all()
    later, _ = scaler.transform(torch.tensor([[[float("nan"), 5.1]]]), before=scaled[-1])
    assert later[0, 0, 0] == scaled[-1, 0, 0]
    assert torch.allclose(later[0, 0, 1], torch.tensor(2.0), rtol=1e-4)
    assert scaler.transform(torch.full((1, 1, 2), 1e6))[0].max() == 10.0
    with pytest.raises(ValueError, match=r"X has 1 columns without any value: \(node-0, metric-1\)"):
        Scaler.fit(read_metrics(torch.tensor([[[1.0, float("nan")]]])), clip=10.0)
