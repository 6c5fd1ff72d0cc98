"""The detector: finds injected faults, keeps PyOD's conventions, saves, loads, streams and resumes."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import average_precision_score

from models.topomad import TopoMAD
from models.topomad.simulate import simulate
from models.topomad.training import Trainer

SMALL = {"hidden_features": 4, "epochs": 4, "window": 6, "learning_rate": 1e-2, "validation_share": 0.1}


@pytest.fixture(scope="module")
def system():
    return simulate(8, 700, num_faults=6, clean_share=0.6, seed=1)


@pytest.fixture(scope="module")
def frame(system):
    columns = pd.MultiIndex.from_product([system.nodes, system.metrics], names=["node", "metric"])
    index = pd.date_range("2024-01-01", periods=len(system.values), freq="5min")
    return pd.DataFrame(system.values.flatten(1).numpy(), index=index, columns=columns)


@pytest.fixture(scope="module")
def edges(system):
    return [(system.nodes[s], system.nodes[t]) for s, t in system.edge_index.t().tolist()]


@pytest.fixture(scope="module")
def fitted(frame, edges):
    return TopoMAD(**SMALL).fit(frame[:420], edges)


def test_faults_are_found_and_their_nodes_named(system):
    X = system.values.numpy()
    detector = TopoMAD(hidden_features=8, epochs=8, learning_rate=1e-2, window=8)
    detector.fit(X[:420], system.edge_index)
    scores = detector.decision_function(X[420:])
    labels = system.labels[420:].any(1).numpy()
    assert scores.shape == (280,) and np.isnan(scores[:7]).all() and not np.isnan(scores[7:]).any()
    assert average_precision_score(labels[7:], scores[7:]) > 0.8
    nodes = detector.node_scores(X)
    first = [nodes[f.start : f.stop].mean(0).argmax() == f.node for f in system.faults]
    assert np.mean(first) >= 0.7


def test_pyods_conventions(fitted, frame):
    scores = fitted.decision_function(frame[420:])
    assert fitted.decision_scores_.shape == fitted.labels_.shape == (420,)
    labels = fitted.predict(frame[420:])
    assert np.array_equal(labels, (np.nan_to_num(scores, nan=-1) > fitted.threshold_).astype(int))
    assert fitted.labels_.sum() == 5  # 1 % of the 415 rows that have a score
    assert len(fitted.history_) <= 4 and fitted.history_[-1].train_loss < fitted.history_[0].train_loss
    parameters = fitted.get_params()
    assert TopoMAD(**parameters).get_params() == parameters
    with pytest.raises(ValueError, match="TopoMAD has no parameter 'epoch'; it has kind, hidden_features"):
        fitted.set_params(epoch=3)
    with pytest.raises(RuntimeError, match="not fitted yet"):
        TopoMAD().predict(frame)


def test_the_threshold_may_change_after_fit(fitted):
    found = {}
    for rule in ("quantile", "mad", "pot", 1.5):
        fitted.set_params(threshold=rule)
        found[rule] = fitted.threshold_
    fitted.set_params(threshold="quantile")
    assert found[1.5] == 1.5 and len(set(found.values())) == 4
    scores = fitted.decision_scores_[5:]
    assert found["quantile"] < scores.max() and found["pot"] > found["quantile"]
    fitted.threshold = "best"
    with pytest.raises(ValueError, match="a number or one of quantile, mad, pot, got 'best'"):
        _ = fitted.threshold_
    fitted.threshold = "quantile"


def test_columns_may_come_in_any_order_and_must_be_known(fitted, frame):
    order = np.random.default_rng(0).permutation(frame.shape[1])
    shuffled = frame.iloc[420:, order]
    assert np.array_equal(
        fitted.decision_function(frame[420:]), fitted.decision_function(shuffled), equal_nan=True
    )
    scores = fitted.metric_scores(shuffled)
    assert scores.shape == (280, frame.shape[1]) and scores.index.equals(frame.index[420:])
    renamed = frame[420:].rename(columns={"service-3": "service-x"}, level=0)
    with pytest.raises(
        ValueError, match=r"the nodes of training; missing \['service-3'\], unknown \['service-x'\]"
    ):
        fitted.predict(renamed)


def test_node_and_metric_scores_add_up(fitted, frame):
    nodes, metrics = fitted.node_scores(frame[420:]), fitted.metric_scores(frame[420:])
    assert list(nodes.columns) == list(fitted.nodes_)
    again = metrics.T.groupby(level="node").mean().T[list(nodes.columns)]
    assert np.allclose(again, nodes, equal_nan=True, rtol=1e-5)
    assert np.allclose(nodes.max(axis=1), fitted.decision_function(frame[420:]), equal_nan=True)


def test_explain_names_the_node(fitted, frame, system):
    fault = max(system.faults, key=lambda f: f.stop - f.start)
    alarms = fitted.set_params(threshold="quantile").explain(frame, top_k=2)
    during = [
        a for a in alarms if a.start <= frame.index[fault.stop - 1] and a.stop >= frame.index[fault.start]
    ]
    assert any(a.nodes[0][0] == system.nodes[fault.node] for a in during)
    for alarm in alarms:
        assert len(alarm.nodes) == len(alarm.metrics) == 2 and alarm.nodes[0][1] >= alarm.nodes[1][1] > 0
        assert alarm.score > fitted.threshold_


def test_a_stream_gives_the_scores_of_the_whole(fitted, frame):
    part = frame[420:460].copy()
    part.iloc[10:13, 3] = np.nan
    whole = fitted.decision_function(part)
    fitted.reset_stream()
    pieces = [fitted.score_next(part[a:b]) for a, b in ((0, 1), (1, 3), (3, 20), (20, 21), (21, 40))]
    assert np.allclose(np.concatenate(pieces), whole, equal_nan=True, rtol=1e-4, atol=1e-6)
    fitted.reset_stream()
    assert np.isnan(fitted.score_next(part.to_numpy()[:1].reshape(1, 8, -1))).all()


def test_saved_and_loaded_it_is_the_same(fitted, frame, tmp_path):
    fitted.save(tmp_path / "detector.safetensors")
    loaded = TopoMAD.load(tmp_path / "detector.safetensors")
    assert np.array_equal(
        fitted.decision_function(frame[420:]), loaded.decision_function(frame[420:]), equal_nan=True
    )
    assert loaded.threshold_ == fitted.threshold_ and loaded.history_ == fitted.history_
    assert np.array_equal(loaded.labels_, fitted.labels_)
    (tmp_path / "text").write_text("no detector")
    with pytest.raises(ValueError, match="text: not a safetensors file"):
        TopoMAD.load(tmp_path / "text")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="other: a safetensors file, but not of a TopoMAD detector"):
        TopoMAD.load(tmp_path / "other")


def test_the_seed_decides_and_the_global_random_state_is_left_alone(frame, edges, fitted):
    state, array = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    again = TopoMAD(**SMALL).fit(frame[:420], edges)
    assert torch.equal(torch.random.get_rng_state(), state) and (np.random.get_state()[1] == array).all()
    assert np.array_equal(again.decision_scores_, fitted.decision_scores_, equal_nan=True)
    other = TopoMAD(**SMALL, random_state=1).fit(frame[:420], edges)
    assert not np.array_equal(other.decision_scores_, fitted.decision_scores_, equal_nan=True)


def test_killed_it_resumes_and_ends_with_the_same_weights(frame, edges, tmp_path, monkeypatch):
    settings = SMALL | {"kind": "GAT", "heads": 2, "dropout": 0.3, "epochs": 5}
    undisturbed = TopoMAD(**settings).fit(frame[:200], edges)
    path = tmp_path / "run.pt"
    steps = iter(range(13))  # the 14th step, in the middle of the third epoch, is the kill

    def killed(self, *arguments):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step(self, *arguments)

    step = Trainer._step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_step", killed)
        TopoMAD(**settings).fit(frame[:200], edges, checkpoint=path)
    assert len(torch.load(path, weights_only=True)["history"]) >= 1
    resumed = TopoMAD(**settings).fit(frame[:200], edges, checkpoint=path)
    for a, b in zip(resumed.model_.parameters(), undisturbed.model_.parameters(), strict=True):
        assert torch.equal(a, b)
    losses = [[e.train_loss for e in d.history_] for d in (resumed, undisturbed)]
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match="of a run with other settings: learning_rate 0"):
        TopoMAD(**settings | {"learning_rate": 0.1}).fit(frame[:200], edges, checkpoint=path)


def test_missing_values_are_masked_never_filled_from_the_future(frame, edges, fitted):
    gappy = frame[:420].copy()
    gappy.iloc[100:110, 5] = np.nan
    before = gappy.copy()
    detector = TopoMAD(**SMALL).fit(gappy, edges)
    pd.testing.assert_frame_equal(gappy, before)
    assert np.isfinite(detector.history_[-1].train_loss)
    later = frame[420:].copy()
    later.iloc[50:60, 5] = np.nan
    changed = later.copy()
    changed.iloc[60:, 5] += 100
    a, b = fitted.metric_scores(later), fitted.metric_scores(changed)
    assert a.iloc[50:60, 5].isna().all() and a.iloc[50:60].equals(b.iloc[50:60])
    assert not a.iloc[60:70].equals(b.iloc[60:70])


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "WL1"},
        {"kind": "LIN"},
        {"score": "nll", "samples": 5},
        {"pooling": "mean"},
        {"bfloat16": True},
    ],
)
def test_other_settings_work(frame, edges, settings):
    detector = TopoMAD(**SMALL | {"epochs": 1} | settings).fit(frame[:100], edges)
    scores = detector.decision_function(frame[:100])
    assert np.isfinite(scores[5:]).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score": "mse"}, "score must be one of squared_error, nll, got 'mse'"),
        ({"pooling": "sum"}, "pooling must be one of max, mean, got 'sum'"),
        ({"contamination": 1.5}, "contamination must lie between 0 and 1, got 1.5"),
        ({"window": 1}, "window must be at least 2, got 1"),
        ({"window": 60}, "X must have at least 121 rows for window = 60, got 100"),
    ],
)
def test_bad_settings_are_refused(frame, settings, message):
    with pytest.raises(ValueError, match=message):
        TopoMAD(**SMALL | settings).fit(frame[:100])
