"""What only a GPU can show: streams, devices, graphs, memory.

FASTLAYERS_REQUIRE_CUDA=1 turns skips into failures. The numbers of the ops are tested on the device by
`tests/test_ops.py` under `-p tests.on_cuda`.
"""

import os

import pytest
import torch
from torch import Tensor

from fastlayers import LinearList, ops
from fastlayers.equivalence import LinearResult, assert_linear_as_accurate

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
REQUIRED = os.environ.get("FASTLAYERS_REQUIRE_CUDA") == "1"


@pytest.fixture(autouse=True)
def gpu() -> None:
    if GPUS == 0:
        reason = f"no GPU: torch {torch.__version__}, torch.version.cuda {torch.version.cuda}"
        (pytest.fail if REQUIRED else pytest.skip)(reason)


def make_case(b: int, n: int, i: int, o: int, device: str = "cuda") -> tuple[Tensor, ...]:
    """x, weight, bias and grad_out; leaves that want gradients, but for the last."""
    g = torch.Generator(device).manual_seed(0)
    sizes = ((b, n, i), (n, o, i), (n, o), (b, n, o))
    *leaves, grad_out = (torch.randn(s, generator=g, device=device) for s in sizes)
    return (*(t.requires_grad_() for t in leaves), grad_out)


def check(
    x: Tensor, weight: Tensor, bias: Tensor, grad_out: Tensor, y: Tensor, grads: tuple[Tensor, ...]
) -> None:
    result = LinearResult(y.detach().cpu(), *(t.cpu() for t in grads))
    x, weight, bias, grad_out = (t.detach().cpu() for t in (x, weight, bias, grad_out))
    assert_linear_as_accurate(result, None, x, weight, bias, grad_out)


def test_the_compiled_kernels_are_used() -> None:
    for op in ("linear_list", "linear_list_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastlayers::{op}", "CUDA")


def test_runs_on_the_current_stream() -> None:
    """Work queued on a side stream is seen there, in order, without a synchronisation in between."""
    x, weight, bias, _ = (t.detach() for t in make_case(64, 500, 7, 7))
    expected = ops.linear_list(x + 1, weight, bias)
    side = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        ops.linear_list(late + 1, weight, bias)  # the stream's memory is there from now on
        side.synchronize()
        torch.cuda._sleep(50_000_000)  # about 25 ms: a kernel on another stream would overtake it
        late.copy_(x + 1)
        y = ops.linear_list(late, weight, bias)
        assert not side.query(), "the op waited for the GPU"
    side.synchronize()
    assert torch.equal(y, expected)


def test_two_devices() -> None:
    if GPUS < 2:
        pytest.skip("one GPU: a second device needs two")
    x, weight, bias, grad_out = make_case(9, 30, 7, 5, "cuda:1")
    torch.cuda.set_device(0)
    y = ops.linear_list(x, weight, bias)
    grads = torch.autograd.grad(y, (x, weight, bias), grad_out)
    assert torch.cuda.current_device() == 0 and y.device == torch.device("cuda:1")
    check(x, weight, bias, grad_out, y, grads)


def test_operands_on_different_devices_are_refused() -> None:
    x, weight, bias, _ = (t.detach() for t in make_case(3, 4, 5, 6))
    with pytest.raises(ValueError, match="weight must be on x's device cuda:0, got cpu"):
        ops.linear_list(x, weight.cpu(), bias)


def test_forward_and_backward_in_a_cuda_graph() -> None:
    x, weight, bias, grad_out = make_case(32, 300, 7, 7)

    def step() -> tuple[Tensor, tuple[Tensor, ...]]:
        y = ops.linear_list(x, weight, bias)
        return y, torch.autograd.grad(y, (x, weight, bias), grad_out)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grads = step()
    with torch.no_grad():
        for t in (x, weight, bias):
            t.mul_(-0.5)
    graph.replay()
    torch.cuda.synchronize()
    check(x, weight, bias, grad_out, y, grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    x, weight, bias, grad_out = make_case(6, 20, 8, 19)
    with torch.autocast("cuda", dtype):
        y = ops.linear_list(x, weight, bias)
        assert y.dtype == dtype == torch.nn.functional.linear(x, weight[0]).dtype
    grads = torch.autograd.grad(y, (x, weight, bias), grad_out.to(dtype))
    assert all(grad.dtype == torch.float32 for grad in grads)
    half = [t.detach().to(dtype) for t in (x, weight, bias, grad_out)]
    check(*half, y, tuple(grad.to(dtype) for grad in grads))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode: str) -> None:
    layer = LinearList(7, 5, 40).cuda()
    x = torch.randn(16, 40, 7, device="cuda", requires_grad=True)
    compiled = torch.compile(lambda t: layer(t).relu(), fullgraph=True, mode=mode)
    for _ in range(3):  # reduce-overhead: warm-up, capture, replay
        torch.compiler.cudagraph_mark_step_begin()
        grads = torch.autograd.grad(compiled(x).sum(), (x, layer.weight))
        expected = torch.autograd.grad(layer(x).relu().sum(), (x, layer.weight))
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_results_are_the_same_in_every_run() -> None:
    x, weight, bias, grad_out = make_case(70, 333, 7, 6)
    runs = []
    for _ in range(5):
        y = ops.linear_list(x, weight, bias)
        runs.append((y, *torch.autograd.grad(y, (x, weight, bias), grad_out)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_out_of_memory_is_an_error_and_nothing_is_lost() -> None:
    free, _ = torch.cuda.mem_get_info()
    rows = 2 * free // (1000 * 4 * 32)  # the result alone would take twice what is free
    x = torch.ones(1, device="cuda").expand(rows, 1000, 1)
    weight = torch.ones(1000, 32, 1, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with pytest.raises(RuntimeError, match="out of memory"):
        ops.linear_list(x, weight)
    assert torch.cuda.memory_allocated() == before
    y = ops.linear_list(x[:3], weight)
    assert torch.equal(y, torch.ones_like(y))


def test_indices_beyond_32_bits() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * 2**30:
        pytest.skip(f"{free / 2**30:.0f} GiB free: 24 GiB are needed")
    rows, linears = 2**31 // (1000 * 2) + 7, 1000  # more than 2^31 elements in float16
    x = torch.zeros(rows, linears, 2, device="cuda", dtype=torch.float16)
    x[-1] = torch.randn(linears, 2, device="cuda")
    weight = torch.randn(linears, 2, 2, device="cuda", dtype=torch.float16)
    y = ops.linear_list(x, weight)
    assert torch.equal(y[-1:], ops.linear_list(x[-1:].clone(), weight))
    assert not y[:-1].any()
