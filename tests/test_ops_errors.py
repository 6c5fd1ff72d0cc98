"""What ops.linear_list refuses, in the words the user sees."""

import pytest
import torch

from fastlayers import ops


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


CASES = {
    "features": (
        (t(32, 50, 7), t(50, 16, 8)),
        ValueError,
        "linear_list: x must be (*, N, I) = (*, 50, 8) or (*, 1, 8) to match weight (50, 16, 8),"
        " got (32, 50, 7)",
    ),
    "list": (
        (t(32, 49, 8), t(50, 16, 8)),
        ValueError,
        "linear_list: x must be (*, N, I) = (*, 50, 8) or (*, 1, 8) to match weight (50, 16, 8),"
        " got (32, 49, 8)",
    ),
    "one dimension": (
        (t(8), t(50, 16, 8)),
        ValueError,
        "linear_list: x must be (*, N, I) = (*, 50, 8) or (*, 1, 8) to match weight (50, 16, 8), got (8,)",
    ),
    "weight dimensions": (
        (t(4, 5, 8), t(16, 8)),
        ValueError,
        "linear_list: weight must be (N, O, I) with N >= 1, got (16, 8)",
    ),
    "no linears": (
        (t(4, 0, 8), t(0, 16, 8)),
        ValueError,
        "linear_list: weight must be (N, O, I) with N >= 1, got (0, 16, 8)",
    ),
    "bias shape": (
        (t(4, 5, 8), t(5, 6, 8), t(6)),
        ValueError,
        "linear_list: bias must be (N, O) = (5, 6) to match weight (5, 6, 8), got (6,)",
    ),
    "weight dtype": (
        (t(4, 5, 8), t(5, 6, 8, dtype=torch.float64)),
        TypeError,
        "linear_list: weight must have x's dtype torch.float32, got torch.float64",
    ),
    "bias dtype": (
        (t(4, 5, 8), t(5, 6, 8), t(5, 6, dtype=torch.bfloat16)),
        TypeError,
        "linear_list: bias must have x's dtype torch.float32, got torch.bfloat16",
    ),
    "device": (
        (t(4, 5, 8), t(5, 6, 8, device="meta")),
        ValueError,
        "linear_list: weight must be on x's device cpu, got meta",
    ),
    "x no tensor": (([1.0], t(5, 6, 8)), TypeError, "linear_list: x must be a tensor, got list"),
    "weight no tensor": ((t(4, 5, 8), None), TypeError, "linear_list: weight must be a tensor, got NoneType"),
    "bias no tensor": (
        (t(4, 5, 8), t(5, 6, 8), 1.0),
        TypeError,
        "linear_list: bias must be a tensor, got float",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_text_of_each_error(case: str) -> None:
    arguments, kind, text = CASES[case]
    with pytest.raises(kind) as caught:
        ops.linear_list(*arguments)
    assert str(caught.value) == text


@pytest.mark.parametrize("case", [c for c in CASES if "no tensor" not in c])
def test_same_error_in_a_transform(case: str) -> None:
    (x, *others), kind, text = CASES[case]
    with pytest.raises(kind) as caught:
        torch.func.grad(lambda x: ops.linear_list(x, *others).sum())(x)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "case", ["features", "weight dimensions", "no linears", "bias shape", "weight dtype"]
)
def test_the_op_itself_refuses_too(case: str) -> None:
    arguments, _, _ = CASES[case]
    with pytest.raises((RuntimeError, ValueError, TypeError), match="linear_list"):
        torch.ops.fastlayers.linear_list(*arguments)
