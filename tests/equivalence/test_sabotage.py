"""Each planted fault must be found: as `different`, or as a warning."""

import pytest
import torch
from pairs import Stack, pair
from torch import nn

from fastlayers.equivalence import EquivalenceError, Verdict, verify


class Swapped(Stack):
    def __init__(self, linears):
        super().__init__(linears)
        order = [1, 0, *range(2, len(linears))]
        self.weight.data, self.bias.data = self.weight.data[order], self.bias.data[order]


class ReadsTheNextSlice(Stack):
    def forward(self, x):
        return super().forward(x.roll(1, dims=1))


class WithoutBias(Stack):
    def forward(self, x):
        return torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)


class Transposed(Stack):
    def __init__(self, linears):
        super().__init__(linears)
        self.weight.data = self.weight.data.transpose(1, 2).contiguous()


class SlightlyScaled(Stack):
    def forward(self, x):
        return super().forward(x) * (1 + 2e-6)


class SlightlyScaledInFloat32(Stack):
    """A kernel that is wrong in one precision only: no float64 run can see it."""

    def forward(self, x):
        y = super().forward(x)
        return y * (1 + 2e-6) if x.dtype == torch.float32 else y


class _KeepsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor.to(grad), None


class ZeroGradient(Stack):
    """The gradient of linear 2's weight is lost."""

    def forward(self, x):
        factor = torch.ones(self.weight.shape[0], 1, 1)
        factor[2] = 0
        weight = _KeepsGradient.apply(self.weight, factor)
        x_nbi = x.transpose(0, 1)
        return torch.baddbmm(self.bias.unsqueeze(1), x_nbi, weight.transpose(1, 2)).transpose(0, 1)


class ZeroInputGradient(Stack):
    def forward(self, x):
        return super().forward(x.detach() if x.requires_grad else x)


class SlightlyWrongGradientInFloat32(Stack):
    def forward(self, x):
        factor = torch.tensor(1 + 2e-6 if x.dtype == torch.float32 else 1.0, dtype=torch.float64)
        return super().forward(_KeepsGradient.apply(x, factor))


class ForgetsToTrain(Stack):
    """Equal in eval mode, and wrong in train mode."""

    def forward(self, x):
        return super().forward(x) * (0.5 if self.training else 1.0)


class OneWrongElement(Stack):
    def forward(self, x):
        y = super().forward(x).clone()
        y[-1, -1, -1] += 3e-6
        return y


class NotANumber(Stack):
    def forward(self, x):
        y = super().forward(x).clone()
        y[0, 0, 0] = torch.nan
        return y


FAULTS = [
    Swapped,
    ReadsTheNextSlice,
    WithoutBias,
    Transposed,
    SlightlyScaled,
    ZeroGradient,
    ZeroInputGradient,
    ForgetsToTrain,
    OneWrongElement,
    NotANumber,
]


def test_the_pair_without_a_fault_passes():
    original, converted, inputs, param_map = pair()
    report = verify(original, converted, inputs, param_map=param_map)
    report.raise_if_failed()
    assert report.passed and report.verdict <= Verdict.AS_ACCURATE
    assert not report.unchecked and not report.warnings


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_different(fault):
    original, converted, inputs, param_map = pair(fault)
    report = verify(original, converted, inputs, param_map=param_map)
    assert report.verdict == Verdict.DIFFERENT, str(report)
    with pytest.raises(EquivalenceError, match="different") as caught:
        report.raise_if_failed()
    assert caught.value.report is report


@pytest.mark.parametrize("fault", [SlightlyScaledInFloat32, SlightlyWrongGradientInFloat32])
def test_fault_of_one_precision_is_not_accepted(fault):
    """2e-6 of small layers is beyond what rounding explains, though float64 agrees."""
    original, converted, inputs, param_map = pair(fault)
    report = verify(original, converted, inputs, param_map=param_map)
    assert report.verdict == Verdict.DIFFERENT, str(report)
    assert {c.stage for c in report.failures} == {"float32"}
    assert any(c.kind == "linear list" for c in report.failures)


def test_the_wrong_linear_is_named():
    original, converted, inputs, param_map = pair(ZeroGradient)
    report = verify(original, converted, inputs, param_map=param_map)
    named = {c.name for c in report.failures if c.kind == "parameter gradient"}
    assert named == {"heads.2.weight"}


def test_zero_gradient_for_an_unused_linear_is_a_warning():
    class UsesFive(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)[:, :5]

    class UsesFiveOfTheList(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            x = torch.tanh(self.inner.encoder(x))
            return torch.stack([self.inner.heads[i](x[:, i]) for i in range(5)], dim=1)

    original, converted, inputs, param_map = pair()
    param_map = {f"inner.{k}": (f"inner.{v[0]}", *v[1:]) for k, v in param_map.items()}
    report = verify(UsesFiveOfTheList(original), UsesFive(converted), inputs, param_map=param_map)
    assert report.passed, str(report)
    assert any("inner.heads.5.weight" in warning for warning in report.warnings)
