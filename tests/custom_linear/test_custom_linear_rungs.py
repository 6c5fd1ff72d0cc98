"""Every rung of docs/custom_ops.md: the numbers derived on paper, agreement with nn.Linear, its errors."""

import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

from examples.custom_linear import on_paper
from fastlayers.equivalence import assert_linear_as_accurate

pytestmark = pytest.mark.slow  # the first run compiles for about a minute
RUNGS = ["python", "cpp on ATen", "cpp on loops", "op on loops"]
SIZES = [(1, 1, 1), (7, 5, 3), (50, 7, 19), (33, 100, 17), (5, 16, 32), (0, 3, 2), (4, 300, 1)]


def apply(rungs, name):
    return {
        "python": rungs.linear_python.Function.apply,
        "cpp on ATen": rungs.linear_cpp.Function.apply,
        "cpp on loops": rungs.linear_cpp.LoopsFunction.apply,
        "op on loops": rungs.linear_op.linear,
    }[name]


def as_list(function):
    """A function of (B, I) and (O, I) as the judge sees it: a list of one linear."""
    return lambda x, weight, bias: function(x[:, 0], weight[0]).unsqueeze(1)


def test_rungs_are_all_there_and_compiled(rungs):
    assert list(rungs.LAYERS) == RUNGS
    assert rungs.linear_op.compiled


def test_hello(rungs, capfd):
    rungs.linear_cpp.hello()
    assert capfd.readouterr().out == "Hello World!\n"


@pytest.mark.parametrize("name", RUNGS)
def test_lab_numbers(rungs, name):
    y, grad_x, grad_weight = on_paper.run(rungs.LAYERS[name](3, 2))
    assert y.tolist() == [[50, 122], [68, 167]]
    assert grad_x.tolist() == [[9, 12, 15], [14, 19, 24]]
    assert grad_weight.tolist() == [[27, 30, 33], [44, 49, 54]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RUNGS)
def test_as_accurate_as_nn_linear(rungs, name, size, dtype):
    if name == "cpp on loops" and dtype == torch.bfloat16:
        return  # refused, see test_loops_refuse
    batch, in_features, out_features = size
    x, weight = torch.randn(batch, 1, in_features), torch.randn(1, out_features, in_features)
    args = [t.to(dtype) for t in (x, weight, torch.randn(batch, 1, out_features))]
    assert_linear_as_accurate(as_list(apply(rungs, name)), None, args[0], args[1], None, args[2])


@pytest.mark.parametrize("name", RUNGS)
def test_any_strides(rungs, name):
    """Transposed and strided views, and the gradient of a sum, which is one number expanded."""
    x = torch.randint(-4, 5, (5, 12)).float().t()[::2]  # (6, 5); small integers: every sum is exact
    weight = torch.randint(-4, 5, (3, 10)).float()[:, ::2]
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    assert not any(t.is_contiguous() for t in leaves)
    y = apply(rungs, name)(*leaves)
    grad_x, grad_weight = torch.autograd.grad(y.sum(), leaves)
    assert y.is_contiguous()
    assert torch.equal(y, torch.einsum("bi,oi->bo", x, weight))
    assert torch.equal(grad_x, weight.sum(0).expand(6, 5))
    assert torch.equal(grad_weight, x.sum(0).expand(3, 5))


@pytest.mark.parametrize("name", RUNGS)
def test_first_and_second_derivative(rungs, name):
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (2, 3))]
    assert torch.autograd.gradcheck(apply(rungs, name), leaves)
    assert torch.autograd.gradgradcheck(apply(rungs, name), leaves)


WRONG = [
    ((2, 3), (2, 4), r"linear: x must be \(B, I\) = \(\*, 4\) to match weight \(2, 4\), got \(2, 3\)"),
    ((3,), (2, 3), r"linear: x must be \(B, I\) = \(\*, 3\) to match weight \(2, 3\), got \(3,\)"),
    ((2, 5, 3), (2, 3), r"linear: x must be \(B, I\) = \(\*, 3\) .* got \(2, 5, 3\)"),
    ((2, 3), (1, 2, 3), r"linear: weight must be \(O, I\), got \(1, 2, 3\)"),
]


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize(("x", "weight", "message"), WRONG)
def test_wrong_shapes(rungs, name, x, weight, message):
    with pytest.raises(ValueError, match=message):
        apply(rungs, name)(torch.randn(x), torch.randn(weight))


@pytest.mark.parametrize("name", RUNGS)
def test_wrong_dtype_and_device(rungs, name):
    x = torch.randn(2, 3)
    with pytest.raises(
        TypeError, match=r"linear: weight must have x's dtype torch.float32, got torch.float64"
    ):
        apply(rungs, name)(x, torch.randn(2, 3).double())
    with pytest.raises(ValueError, match=r"linear: weight must be on x's device cpu, got meta"):
        apply(rungs, name)(x, torch.empty(2, 3, device="meta"))


X, W, G = torch.ones(4, 3), torch.ones(2, 3), torch.ones(4, 2)
REFUSED = [
    ((X[0], W), ValueError, r"forward_loops: i_input must have 2 dimensions, got shape \[3\]"),
    ((X, W[0]), ValueError, r"forward_loops: i_weight must have 2 dimensions, got shape \[3\]"),
    (
        (X, W[:, :2].contiguous()),
        ValueError,
        r"i_weight must have size 3 in dimension 1 .* got shape \[2, 2\]",
    ),
    ((X.half(), W.half()), TypeError, "forward_loops: i_input must be Float or Double, got Half"),
    ((X, W.double()), TypeError, "i_weight must have i_input's dtype Float, got Double"),
    ((X.to("meta"), W), ValueError, "i_input must be on the CPU, got meta"),
    (
        (torch.ones(3, 4).t(), W),
        ValueError,
        r"i_input must be contiguous, got strides \[1, 4\] for shape \[4, 3\]",
    ),
    ((X, torch.ones(2, 6)[:, ::2]), ValueError, r"i_weight must be contiguous, got strides \[6, 2\]"),
    (
        (G[:3], X, W),
        ValueError,
        r"backward_loops: i_grad must have size 4 in dimension 0 .* got shape \[3, 2\]",
    ),
    ((torch.ones(4, 3), X, W), ValueError, r"i_grad must have size 2 in dimension 1 .* got shape \[4, 3\]"),
    (
        (G, X, torch.ones(2, 5)),
        ValueError,
        r"i_weights must have size 3 in dimension 1 .* got shape \[2, 5\]",
    ),
    ((torch.ones(()).expand(4, 2), X, W), ValueError, r"i_grad must be contiguous, got strides \[0, 0\]"),
    ((G, torch.ones(3, 4).t(), W), ValueError, r"backward_loops: i_input must be contiguous, got strides"),
    (
        (G, X, torch.ones(3, 2).t()),
        ValueError,
        r"i_weights must be contiguous, .* call .contiguous\(\) first",
    ),
]


@pytest.mark.parametrize(("args", "error", "message"), REFUSED)
def test_loops_refuse(rungs, args, error, message):
    functions = {
        2: rungs.linear_cpp._linear_cpp.forward_loops,
        3: rungs.linear_cpp._linear_cpp.backward_loops,
    }
    with pytest.raises(error, match=message):
        functions[len(args)](*args)


def test_op_backward_refuses_a_gradient_that_does_not_fit(rungs):
    with pytest.raises(
        RuntimeError, match=r"linear_backward: grad_y must be \(B, O\) with x's dtype and device"
    ):
        torch.ops.custom_linear.linear_backward(G[:3], X, W)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(rungs, dtype):
    x, weight, grad_y = (torch.randn(s, dtype=dtype, requires_grad=True) for s in ((4, 3), (2, 3), (4, 2)))
    torch.library.opcheck(torch.ops.custom_linear.linear.default, (x, weight))
    torch.library.opcheck(torch.ops.custom_linear.linear.default, (x.detach().t().contiguous().t(), weight))
    torch.library.opcheck(torch.ops.custom_linear.linear_backward.default, (grad_y, x, weight))


@pytest.mark.parametrize("name", RUNGS)
def test_only_what_pytorch_can_see_into_compiles_whole(rungs, name):
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    compiled = torch.compile(apply(rungs, name), fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's own, about Functions it makes and functions it skips
        if name.startswith("cpp"):
            with pytest.raises(torch._dynamo.exc.Unsupported, match="marked as skipped"):
                compiled(x, weight)
        else:
            assert torch.equal(compiled(x, weight), x @ weight.T)


def test_the_op_library_needs_no_cpp_symbol_of_torch(rungs):
    if not shutil.which("nm"):
        pytest.skip("no nm to list symbols with")
    folder, counts = Path(rungs.__file__).parent, {}
    for name in ("_linear_cpp", "_linear_op"):
        (path,) = folder.glob(f"{name}*.so")
        listing = subprocess.run(["nm", "-DC", "--undefined-only", path], capture_output=True, text=True)
        wanted = ("at::", "c10::", "torch::")
        counts[name] = sum(any(w in line for w in wanted) for line in listing.stdout.splitlines())
    assert counts["_linear_op"] == 0 < counts["_linear_cpp"]


def test_benchmark_gives_a_row_for_each_rung_and_verifies_it(rungs):
    from examples.custom_linear import bench

    rows = bench.measure(2, 3, 2, rounds=2)
    assert [row["rung"] for row in rows] == ["nn.Linear", *RUNGS]
    assert all(float(row["time_us"]) > 0 for row in rows)

    class Broken(rungs.linear_python.Layer):
        def forward(self, x):
            return super().forward(x) * (1 + 1e-6)

    with pytest.raises(AssertionError, match="output"):
        bench.verify(Broken(64, 64), torch.randn(32, 64), torch.randn(32, 64))
