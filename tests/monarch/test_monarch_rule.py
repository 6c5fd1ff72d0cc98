"""convert_model with a MonarchRule: only what is named, within its tolerance, and every number true."""

import copy
import json

import pytest
import torch
from torch import nn

from fastlayers import (
    EXACT_RULES,
    ConversionError,
    LinearList,
    MonarchLinear,
    MonarchRule,
    convert_model,
    load_converted,
    plan,
)


class Net(nn.Module):
    """An MLP whose hidden activations are correlated, and a loop of small Linears behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(96, 256)
        self.down = nn.Linear(256, 64)
        self.heads = nn.ModuleList(nn.Linear(64, 3) for _ in range(4))

    def forward(self, x):
        hidden = self.down(torch.relu(self.up(x)))
        return torch.stack([head(hidden) for head in self.heads])


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def batches(count: int, seed: int) -> list[torch.Tensor]:
    """Inputs of few effective dimensions."""
    g = torch.Generator().manual_seed(9)
    mix = torch.randn(12, 96, generator=g)
    g.manual_seed(seed)
    return [
        torch.randn(128, 12, generator=g) @ mix + 0.05 * torch.randn(128, 96, generator=g)
        for _ in range(count)
    ]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


def test_only_named_linears_are_touched(net):
    x = batches(1, 1)[0]
    rule = MonarchRule("up", params=0.25, min_gain=0)
    conversion = convert_model(net, (x,), rules=[rule])
    assert isinstance(conversion.model.up, MonarchLinear) and isinstance(net.up, nn.Linear)
    assert type(conversion.model.down) is nn.Linear and type(conversion.model.heads[0]) is nn.Linear
    assert [r.rule for r in conversion.rewrites] == ["monarch_linear"]
    assert conversion.rewrites[0].call_site.startswith("forward, test_monarch_rule.py:")
    assert conversion.rewrites[0].replaces == ("up",) == (conversion.rewrites[0].into,)
    assert sum(w.numel() for w in conversion.model.up.weights) <= 0.25 * 96 * 256
    assert convert_model(net, (x,), verify=False).rewrites[0].rule == "linear_list"


def test_a_tolerance_holds_on_held_out_inputs_and_every_number_is_recomputed(net):
    rule = MonarchRule(["up", "down"], output_tolerance=0.2, calibration=iter(batches(8, 1)), min_gain=0)
    x = batches(1, 2)[0]
    conversion = convert_model(net, (x,), rules=[rule])
    report = conversion.report
    assert report.passed and [c.path for c in report.comparisons] == ["up", "down"]
    model = conversion.model
    held_out = torch.cat(batches(4, 3))
    calibration = torch.cat(batches(8, 1))
    inputs = {"up": calibration, "down": torch.relu(net.up(calibration))}
    tests = {"up": held_out, "down": torch.relu(net.up(held_out))}
    for entry in report.comparisons:
        old, new, record = getattr(net, entry.path), getattr(model, entry.path), entry.projection
        assert new.projection == record
        assert record.parameters_after == sum(w.numel() for w in new.weights) < record.parameters_before
        assert record.parameters_before == old.weight.numel()

        def error(x, old=old, new=new):
            return relative(new(x) - new.bias, old(x) - old.bias)

        assert error(inputs[entry.path]) == pytest.approx(record.output_error, rel=1e-3)
        assert error(tests[entry.path]) < 0.2 * 1.05  # 512 tokens from the same distribution
        assert relative(new.to_dense(), old.weight) == pytest.approx(record.weight_error, rel=1e-4)
    ((_, whole),) = report.outputs
    assert whole == pytest.approx(relative(model(x), net(x)), rel=1e-4)
    stored = json.loads(conversion.to_json())["report"]
    assert stored["kind"] == "approximation" and stored["layers"][0]["projection"]["rank"] == model.up.rank
    text = str(conversion)
    assert "approximated, within the tolerances" in text and "as accurate" not in text


def test_a_layer_that_cannot_keep_its_tolerance_stays_dense_with_the_best_error(net):
    rule = MonarchRule(["up", "down"], weight_tolerance=0.05, min_gain=0)
    conversion = convert_model(net, (batches(1, 1)[0],), rules=[rule])
    assert not conversion.rewrites and type(conversion.model.up) is nn.Linear
    found = {s.path: s for s in conversion.skips}
    assert found["up"].code == "tolerance"
    assert found["up"].reason.startswith("best error 0.") and "asked 0.05" in found["up"].reason
    best = float(found["up"].reason.split()[2])
    # No grid at the limit on parameters is better.
    for dims in (((96, 1), (1, 256)), ((48, 2), (2, 128)), ((24, 4), (4, 64)), ((96, 1), (4, 64))):
        layer = MonarchLinear.from_linear(net.up, params=0.8, in_dims=dims[0], out_dims=dims[1])
        assert layer.projection.weight_error >= best - 1e-4


def test_a_layer_that_gains_nothing_stays_dense(net):
    conversion = convert_model(net, (batches(1, 1)[0][:1],), rules=[MonarchRule("up", params=0.25)])
    (entry,) = [s for s in conversion.skips if s.path == "up"]
    assert entry.code == "no-gain" and "times as fast at 1 tokens, with error 0." in entry.reason


def test_a_budget_goes_where_it_saves_most(net):
    with torch.no_grad():  # one layer that is nearly of rank 8, one that is not
        u, s, v = torch.linalg.svd(net.up.weight, full_matrices=False)
        s[8:] *= 0.01
        net.up.weight.copy_(u @ torch.diag(s) @ v)
    rule = MonarchRule(["up", "down"], params=0.4, min_gain=0, grouping="strided")
    conversion = convert_model(net, (batches(1, 1)[0],), rules=[rule])
    model = conversion.model
    spent = {path: sum(w.numel() for w in getattr(model, path).weights) for path in ("up", "down")}
    dense = {path: getattr(net, path).weight.numel() for path in spent}
    assert sum(spent.values()) <= 0.4 * sum(dense.values())
    assert spent["up"] / dense["up"] < 0.4 < spent["down"] / dense["down"]
    apart = sum(
        MonarchLinear.from_linear(getattr(net, p), params=0.4, grouping="strided").projection.weight_error
        ** 2
        for p in spent
    )
    together = sum(getattr(model, p).projection.weight_error ** 2 for p in spent)
    assert together < apart


def test_with_the_exact_rules(net):
    x = batches(1, 1)[0]
    conversion = convert_model(net, (x,), rules=[*EXACT_RULES, MonarchRule("up", params=0.3, min_gain=0)])
    assert isinstance(conversion.model.heads, LinearList) and isinstance(conversion.model.up, MonarchLinear)
    assert conversion.report.exact.passed and conversion.report.passed
    reverted = conversion.revert()
    assert type(reverted.up) is nn.Linear and type(reverted.heads[2]) is nn.Linear
    assert torch.equal(reverted.heads[2].weight, net.heads[2].weight)


def test_revert_gives_dense_linears_that_compute_the_same(net):
    x = batches(1, 1)[0]
    conversion = convert_model(net, (x,), rules=[MonarchRule("up", params=0.3, min_gain=0)])
    optimizer = torch.optim.SGD(conversion.model.parameters(), 0.1)
    conversion.model(x).square().mean().backward()
    optimizer.step()
    reverted = conversion.revert()
    assert type(reverted.up) is nn.Linear and isinstance(conversion.model.up, MonarchLinear)
    assert list(reverted.state_dict()) == list(net.state_dict())
    assert relative(reverted(x), conversion.model(x)) < 1e-5
    restored = conversion.restore_state_dict(conversion.model.state_dict())
    assert all(torch.equal(restored[k], v) for k, v in reverted.state_dict().items())


@pytest.mark.parametrize("rules", [[], list(EXACT_RULES)], ids=["alone", "with the exact rules"])
def test_a_saved_conversion_loads_into_a_fresh_model(net, tmp_path, rules):
    x = batches(1, 1)[0]
    rule = MonarchRule(["up", "down"], params=0.3, min_gain=0)
    conversion = convert_model(net, (x,), rules=[*rules, rule])
    conversion.save(tmp_path / "net.safetensors")
    fresh = load_converted(Net(), (x,), tmp_path / "net.safetensors")
    assert torch.equal(fresh.model(x), conversion.model(x))
    assert [r.into for r in fresh.rewrites] == [r.into for r in conversion.rewrites]
    assert type(fresh.revert().up) is nn.Linear
    with pytest.raises(ConversionError, match="belongs to another model"):
        load_converted(nn.Sequential(nn.Linear(96, 2)), (x,), tmp_path / "net.safetensors")


def test_inplace_and_failure_leave_the_model_whole(net):
    x = batches(1, 1)[0]
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ConversionError, match="the model fails on the inputs"):
        convert_model(net, (x,), rules=[MonarchRule("up", params=0.3, calibration=[x[:, :5]])], inplace=True)
    assert type(net.up) is nn.Linear
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    conversion = convert_model(net, (x,), rules=[MonarchRule("up", params=0.3, min_gain=0)], inplace=True)
    assert conversion.model is net and isinstance(net.up, MonarchLinear)
    with pytest.raises(ConversionError, match="factors are new parameters"):
        conversion.convert_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(ConversionError, match="load the weights into the original model"):
        conversion.convert_state_dict(before)


def test_what_cannot_be_replaced_says_why():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 64)
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
            self.head = nn.Linear(64, 32, bias=False)
            self.head.weight = self.embedding.weight
            self.spare = nn.Linear(64, 64)

        def forward(self, tokens):
            x = self.embedding(tokens)
            return self.head(self.attention(x, x, x)[0])

    model = Odd()
    rule = MonarchRule("*", params=0.3, min_gain=0)
    conversion = convert_model(model, (torch.randint(32, (2, 5)),), rules=[rule])
    codes = {s.path: (s.code, s.reason) for s in conversion.skips}
    assert codes["attention.out_proj"][0] == "functional-use"
    assert "MultiheadAttention reads its weight" in codes["attention.out_proj"][1]
    assert codes["head"][0] == "tied" and codes["spare"][0] == "unused"
    assert not conversion.rewrites


@pytest.mark.parametrize("training", [True, False])
def test_the_mlp_of_a_transformer_layer(training):
    """In eval mode nn.TransformerEncoderLayer would read linear1.weight on its fast path."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True).train(training)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x = torch.randn(3, 7, 32)
    rule = MonarchRule("re:.*linear[12]", rank=32, in_dims=(32, 1), out_dims=(1, 128), min_gain=0)
    rules = [MonarchRule("*.linear2", rank=32, in_dims=(128, 1), out_dims=(1, 32), min_gain=0), rule]
    conversion = convert_model(model, (x,), rules=rules)  # the full rank: nothing is lost
    assert len(conversion.rewrites) == 4
    with torch.no_grad():
        assert relative(conversion.model(x), model(x)) < 1e-5


def test_a_plan_says_it_without_doing_it(net):
    x = batches(1, 1)[0]
    found = plan(net, (x,), rules=[MonarchRule("up", params=0.3, min_gain=0)])
    assert [m.rule for m in found.matches] == ["monarch_linear"] and type(net.up) is nn.Linear
    assert "approximation: up: (" in str(found)
    with pytest.raises(ConversionError, match="fitted anew: pass its rules instead"):
        convert_model(net, (x,), plan=found)


BAD = [
    ({}, "say how small or how exact"),
    ({"output_tolerance": 0.1}, "output_tolerance needs calibration inputs"),
    ({"weight_tolerance": 0.1, "output_tolerance": 0.1, "calibration": []}, "not both"),
    ({"params": 1.5}, "params is a share of the dense parameters, got 1.5"),
    ({"rank": 2, "params": 0.5}, "rank sets what params and the tolerances would"),
    ({"params": -1}, "params must be positive, got -1"),
    ({"params": 0.5, "in_dims": (2, 48)}, "give in_dims and out_dims, or neither"),
    ({"params": 0.5, "grouping": "both"}, 'grouping must be "strided", "contiguous" or None'),
]


@pytest.mark.parametrize("change, text", BAD, ids=[t for _, t in BAD])
def test_refused(net, change, text):
    with pytest.raises(ValueError, match="MonarchRule: ") as info:
        convert_model(net, (batches(1, 1)[0],), rules=[MonarchRule("up", **change)])
    assert text in str(info.value)


def test_names_that_match_nothing_are_errors(net):
    with pytest.raises(ValueError, match="include: 'ups' matches no Linear"):
        convert_model(net, (batches(1, 1)[0],), rules=[MonarchRule("ups", params=0.5)])
    with pytest.raises(TypeError):
        MonarchRule("up", None, 0.5)  # what sets the size is named
