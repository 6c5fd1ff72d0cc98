"""An optimizer follows a conversion, and back, as if nothing had happened; or is refused, unchanged."""

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn, optim

from fastlayers.convert import ConversionError, convert_model, plan

STEPS = 5


class Towers(nn.Module):
    """A list that becomes a stack, two unequal heads that become one wide Linear, and a trunk that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 3) for _ in range(5)])
        self.trunk = nn.Linear(15, 6)
        self.mean, self.scale = nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.tanh(torch.cat([layer(x[:, n]) for n, layer in enumerate(self.experts)], -1))
        h = torch.tanh(self.trunk(h))
        return self.mean(h), self.scale(h)


def batch(step: int) -> torch.Tensor:
    return torch.randn(7, 5, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def make(seed: int = 0) -> Towers:
    torch.manual_seed(seed)
    return Towers().double()


@functools.cache
def towers_plan():
    return plan(make(), (batch(0),))


def convert(model: Towers, **options):
    return convert_model(model, (batch(0),), plan=towers_plan(), verify=False, **options)


def backward(model: nn.Module, step: int) -> None:
    mean, scale = model(batch(step))
    (mean.square().sum() + (scale - 1).square().sum()).backward()


def train(model: nn.Module, optimizer: optim.Optimizer, start: int, steps: int = STEPS) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def assert_equal(state: dict, expected: dict) -> None:
    """Equal to float64 rounding: 1e-12 of each tensor's largest element."""
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (state[name] - tensor).abs().max() <= 1e-12 * tensor.abs().max(), name


def state_of(optimizer: optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": torch.as_tensor(value)
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if value is not None
    }


SETTINGS = {
    "sgd": lambda p: optim.SGD(p, lr=0.01),
    "sgd momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "sgd nesterov foreach": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "adam": lambda p: optim.Adam(p, lr=0.01, betas=(0.8, 0.95)),
    "adam tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adam amsgrad foreach": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adam fused": lambda p: optim.Adam(p, lr=0.01, fused=True, maximize=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.3),
    "adamw amsgrad fused": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.2),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.01, t0=2),
}


@pytest.mark.parametrize(
    "setting, warm_up", [*((name, 3) for name in SETTINGS), ("sgd momentum", 0), ("adam", 0), ("adagrad", 0)]
)
def test_training_goes_on_as_if_never_converted_and_back(setting, warm_up):
    model = make()
    optimizer = SETTINGS[setting](model.parameters())
    train(model, optimizer, 0, warm_up)
    twin, other = copy.deepcopy((model, optimizer))
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    before = copy.deepcopy(model.state_dict())

    conversion = convert(model)
    assert sorted(r.rule for r in conversion.rewrites) == ["linear_list", "wide_linear"]
    conversion.convert_optimizer(optimizer)
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == options
    assert optimizer.param_groups[0]["params"] == list(conversion.model.parameters())
    train(conversion.model, optimizer, warm_up)
    train(twin, other, warm_up)
    assert_equal(conversion.restore_state_dict(conversion.model.state_dict()), twin.state_dict())
    assert all(torch.equal(model.state_dict()[k], before[k]) for k in before), "the original was changed"

    reverted = conversion.revert()
    conversion.restore_optimizer(optimizer, reverted)
    assert_equal(state_of(optimizer, reverted), state_of(other, twin))
    assert optimizer.param_groups[0]["params"] == list(reverted.parameters())
    train(reverted, optimizer, warm_up + STEPS)
    train(twin, other, warm_up + STEPS)
    assert_equal(reverted.state_dict(), twin.state_dict())


def test_in_place_conversion_takes_the_parameters_the_optimizer_still_holds():
    model = make()
    optimizer = SETTINGS["adamw"](model.parameters())
    train(model, optimizer, 0)
    twin, other = copy.deepcopy((model, optimizer))
    conversion = convert(model, inplace=True)
    conversion.convert_optimizer(optimizer)
    assert conversion.model is model
    train(model, optimizer, 5)
    train(twin, other, 5)
    assert_equal(conversion.restore_state_dict(model.state_dict()), twin.state_dict())


def test_state_dicts_of_both_kinds_load_into_fresh_optimizers():
    model = make()
    optimizer = SETTINGS["adam"](model.parameters())
    train(model, optimizer, 0)
    conversion = convert(model)
    conversion.convert_optimizer(optimizer)
    twin = copy.deepcopy(conversion.model)
    fresh = SETTINGS["adam"](twin.parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(conversion.model, optimizer, 5)
    train(twin, fresh, 5)
    assert_equal(twin.state_dict(), conversion.model.state_dict())
    reverted = conversion.revert()
    conversion.restore_optimizer(optimizer, reverted)
    twin = copy.deepcopy(reverted)
    fresh = SETTINGS["adam"](twin.parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(reverted, optimizer, 10)
    train(twin, fresh, 10)
    assert_equal(twin.state_dict(), reverted.state_dict())


def test_groups_keep_their_hyperparameters_order_names_and_scheduler():
    def groups(model):
        named = list(model.named_parameters())
        late = [(n, p) for n, p in named if not n.startswith("experts")]
        early = [(n, p) for n, p in named if n.startswith("experts")][::-1]
        return [{"params": late, "lr": 0.02, "note": "late"}, {"params": early, "weight_decay": 0.1}]

    model = make()
    optimizer = optim.AdamW(groups(model), lr=0.01)
    twin = copy.deepcopy(model)
    other = optim.AdamW(groups(twin), lr=0.01)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    other_scheduler = optim.lr_scheduler.StepLR(other, 1, 0.5)
    train(model, optimizer, 0)
    train(twin, other, 0)
    group_objects = list(optimizer.param_groups)
    conversion = convert(model)
    conversion.convert_optimizer(optimizer)
    assert all(a is b for a, b in zip(optimizer.param_groups, group_objects, strict=True))
    first, second = optimizer.param_groups
    assert (first["lr"], first["note"], second["weight_decay"]) == (0.02, "late", 0.1)
    assert second["param_names"] == ["experts.bias", "experts.weight"]  # its own order, reversed
    names = dict(conversion.model.named_parameters())
    assert all(
        names[n] is p for g in (first, second) for n, p in zip(g["param_names"], g["params"], strict=True)
    )
    scheduler.step(), other_scheduler.step()
    train(conversion.model, optimizer, 5)
    train(twin, other, 5)
    assert_equal(conversion.restore_state_dict(conversion.model.state_dict()), twin.state_dict())
    reverted = conversion.revert()
    conversion.restore_optimizer(optimizer, reverted)
    train(reverted, optimizer, 10)
    train(twin, other, 10)
    assert_equal(reverted.state_dict(), twin.state_dict())


def test_pending_gradients_go_along():
    model = make()
    optimizer = SETTINGS["sgd"](model.parameters())
    backward(model, 0)
    twin, other = copy.deepcopy(model), None
    other = SETTINGS["sgd"](twin.parameters())
    backward(twin, 0)
    conversion = convert(model)
    conversion.convert_optimizer(optimizer)
    kept = model.trunk.weight.grad.clone()
    backward(conversion.model, 1), backward(twin, 1)  # accumulated
    assert torch.equal(model.trunk.weight.grad, kept), "the original's gradient was changed"
    reverted = conversion.revert()
    conversion.restore_optimizer(optimizer, reverted)
    backward(reverted, 2), backward(twin, 2)
    optimizer.step(), other.step()
    assert_equal(reverted.state_dict(), twin.state_dict())


def test_capturable_and_its_step_tensors_stay():
    model = make()
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 0)
    optimizer.param_groups[0]["capturable"] = True
    for state in optimizer.state.values():
        state["step"] = state["step"].double()
    conversion = convert(model)
    conversion.convert_optimizer(optimizer)
    steps = [state["step"] for state in optimizer.state.values()]
    assert optimizer.param_groups[0]["capturable"] and len(steps) == len(list(conversion.model.parameters()))
    assert {(float(s), s.dtype) for s in steps} == {(5.0, torch.float64)}
    reverted = conversion.revert()
    conversion.restore_optimizer(optimizer, reverted)
    steps = [state["step"] for state in optimizer.state.values()]
    assert {(float(s), s.dtype) for s in steps} == {(5.0, torch.float64)}
    assert len({s.data_ptr() for s in steps}) == len(steps), "parameters count their steps together"


def test_convolutions_state_takes_their_shape():
    class Mixers(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.ModuleList([nn.Conv1d(4, 3, 1) for _ in range(3)])

        def forward(self, x):
            return torch.stack([layer(x[:, n]) for n, layer in enumerate(self.mix)], 1)

    torch.manual_seed(0)
    model = Mixers().double()
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    optimizer = SETTINGS["adam"](model.parameters())

    def step(m, o):
        o.zero_grad()
        m(x).square().sum().backward()
        o.step()

    step(model, optimizer)
    twin, other = copy.deepcopy((model, optimizer))
    conversion = convert_model(model, (x,), verify=False)
    assert conversion.rewrites[0].spatial == 1
    conversion.convert_optimizer(optimizer)
    step(conversion.model, optimizer), step(twin, other)
    reverted = conversion.revert()
    conversion.restore_optimizer(optimizer, reverted)
    step(reverted, optimizer), step(twin, other)
    assert_equal(reverted.state_dict(), twin.state_dict())
    assert_equal(state_of(optimizer, reverted), state_of(other, twin))


# Refusals: each says what was expected and what came, and leaves the optimizer as it was.


def refused(
    optimizer: optim.Optimizer, text: str, error: type = ConversionError, model: nn.Module | None = None
):
    model = model or make()
    conversion = convert(model)
    check_refused(optimizer, text, lambda: conversion.convert_optimizer(optimizer), error)


def check_refused(optimizer, text, attempt, error=ConversionError):
    before = ([list(g["params"]) for g in optimizer.param_groups], dict(optimizer.state))
    with pytest.raises(error) as caught:
        attempt()
    assert text in str(caught.value), str(caught.value)
    after = ([list(g["params"]) for g in optimizer.param_groups], dict(optimizer.state))
    assert all(a is b for x, y in zip(before[0], after[0], strict=True) for a, b in zip(x, y, strict=True))
    assert before[1].keys() == after[1].keys() and all(after[1][k] is v for k, v in before[1].items())


class MyAdam(optim.Adam):
    pass


@pytest.mark.parametrize(
    "kind",
    [
        optim.LBFGS,
        optim.Adafactor,
        optim.SparseAdam,
        MyAdam,
        lambda p: optim.Muon([q for q in p if q.ndim == 2]),
    ],
)
def test_refuses_optimizers_that_may_look_at_whole_tensors(kind):
    model = make()
    optimizer = kind(model.parameters())
    text = f"RMSprop, Rprop, SGD, which treat each element alone; got {type(optimizer).__module__}."
    refused(optimizer, text + type(optimizer).__qualname__, model=model)


def test_refuses_what_is_no_optimizer():
    conversion = convert(make())
    text = r"convert_optimizer: optimizer must be a torch.optim.Optimizer, got dict"
    with pytest.raises(TypeError, match=text):
        conversion.convert_optimizer({})


def test_refuses_groups_that_split_a_fused_tensor():
    model = make()
    split = optim.Adam(
        [{"params": model.experts[:2].parameters()}, {"params": model.experts[2:].parameters()}]
    )
    refused(
        split,
        "convert_optimizer: the parts of experts.weight must all be in one param group, got experts.0.weight"
        " in group 0 and experts.2.weight in group 1",
        model=model,
    )
    part = optim.Adam([*model.experts[1:].parameters(), *model.trunk.parameters()])
    refused(part, "experts.1.weight in group 0 and experts.0.weight in no group", model=model)
    wide = optim.SGD(model.mean.parameters())
    refused(wide, "mean.weight in group 0 and scale.weight in no group", model=model)


def trained(setting: str = "adam") -> tuple[nn.Module, optim.Optimizer]:
    model = make()
    optimizer = SETTINGS[setting](model.parameters())
    train(model, optimizer, 0, 2)
    return model, optimizer


def test_refuses_items_with_different_step_counts():
    model, optimizer = trained()
    optimizer.state[model.experts[3].bias]["step"] += 1
    text = (
        "the parts of experts.bias must have one step, got 2.0 for experts.0.bias and 3.0 for experts.3.bias"
    )
    refused(optimizer, text, model=model)


def test_refuses_partial_state():
    model, optimizer = trained("sgd momentum")
    del optimizer.state[model.experts[2].weight]
    text = "the same state, got momentum_buffer for experts.0.weight and none for experts.2.weight"
    refused(optimizer, f"the parts of experts.weight must have {text}", model=model)


def test_refuses_a_mix_with_and_without_amsgrad():
    model, optimizer = trained("adam amsgrad foreach")
    del optimizer.state[model.scale.weight]["max_exp_avg_sq"]
    text = "max_exp_avg_sq for mean.weight and step, exp_avg, exp_avg_sq for scale.weight"
    refused(optimizer, text, model=model)


def test_refuses_state_that_is_neither_per_element_nor_one_number():
    model, optimizer = trained()
    for layer in model.experts:
        optimizer.state[layer.weight]["row"] = torch.zeros(3)
    refused(
        optimizer,
        "state 'row' of experts.0.weight must be one number or have its shape (3, 4), got (3,)",
        model=model,
    )


def test_refuses_gradients_of_some_items_only():
    model, optimizer = trained()
    model.experts[4].weight.grad = None
    refused(
        optimizer,
        "gradients all or none, got none for experts.4.weight; call optimizer.zero_grad()",
        model=model,
    )


def test_refuses_parameters_that_are_not_the_original_models():
    model, other = make(), nn.Linear(2, 3)
    optimizer = optim.SGD([*model.parameters(), *other.parameters()])
    text = "all its parameters must be the original model's; param_groups[0]['params'][16] of shape (3, 2)"
    refused(optimizer, text, model=model)


def test_refuses_a_second_conversion_and_the_wrong_direction():
    model, optimizer = trained()
    conversion = convert(model)
    reverted = conversion.revert()
    text = "restore_optimizer: all its parameters must be the converted model's; param_groups[0]['params'][0]"
    check_refused(optimizer, text, lambda: conversion.restore_optimizer(optimizer, reverted))
    conversion.convert_optimizer(optimizer)
    text = "not; these are the converted model's already"
    check_refused(optimizer, text, lambda: conversion.convert_optimizer(optimizer))
    text = (
        "restore_optimizer: model must have the original's structure; experts.weight (5, 3, 4) is not of it"
    )
    check_refused(optimizer, text, lambda: conversion.restore_optimizer(optimizer, conversion.model))
    del reverted.mean, reverted.scale
    with pytest.raises(ConversionError, match="nothing in it comes from"):
        conversion.restore_optimizer(optimizer, reverted)


def test_refuses_a_model_that_moved_meanwhile():
    model, optimizer = trained()
    conversion = convert(model)
    conversion.model.float()
    text = "one dtype and device, got torch.float64 on cpu for experts.0.weight and torch.float32 on cpu for"
    check_refused(optimizer, text, lambda: conversion.convert_optimizer(optimizer))


def test_a_conversion_keeps_no_original_alive_and_can_be_pickled():
    model, optimizer = trained()
    conversion = convert(model)
    again = pickle.loads(pickle.dumps(conversion))
    with pytest.raises(ConversionError, match="must be the original model's"):
        again.convert_optimizer(optimizer)
    references = [weakref.ref(p) for p in model.parameters()]
    del model, optimizer
    gc.collect()
    assert not any(reference() is not None for reference in references)
