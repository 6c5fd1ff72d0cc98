"""A converted model lives on like any other: copied, stored, averaged, replicated, compiled, transformed."""

import copy
import functools
import io
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from fastlayers import LinearList
from fastlayers.convert import Conversion, convert_model
from fastlayers.convert._heads import FusedLinear


class Members(nn.Module):
    """A list that keeps its path, two heads that become one wide Linear, pairs that become two stacks.

    For any other batch size than 4 the original loop runs, over the heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 3) for _ in range(5)])
        self.towers = nn.ModuleList(
            [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in range(5)]
        )
        self.mean, self.scale = nn.Linear(10, 2), nn.Linear(10, 3)

    def forward(self, x):
        flip = 1.0 if x.shape[0] == 4 else -1.0
        h = [layer(x[:, n]) for n, layer in enumerate(self.experts)]
        h = torch.cat([tower(h[n]) for n, tower in enumerate(self.towers)], -1)
        return torch.cat([self.mean(h) * flip, self.scale(h)], -1)


FAST, SLOW = 4, 3  # batch sizes


def batch(size: int) -> torch.Tensor:
    return torch.randn(size, 5, 4, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


@functools.cache
def conversion() -> Conversion:
    conversion = convert_model(Members().double(), (batch(FAST),), verify=False)
    assert len(conversion.rewrites) == 4 and sum(r.rule == "wide_linear" for r in conversion.rewrites) == 1
    assert any("shape[0] == 4" in guard for guard in conversion.rewrites[0].guards)
    return conversion


def make() -> tuple[nn.Module, nn.Module]:
    """The original and the converted model."""
    torch.manual_seed(0)
    model = Members().double()
    return model, convert_model(model, (batch(FAST),), plan=conversion().plan, verify=False).model


def assert_close(result, expected) -> None:
    """Equal to float64 rounding: 1e-12 of the largest element."""
    assert (result - expected).abs().max() <= 1e-12 * expected.abs().max()


def assert_same_gradients(model: nn.Module, original: nn.Module) -> None:
    grads = conversion().restore_state_dict({name: p.grad for name, p in model.named_parameters()})
    for name, p in original.named_parameters():
        assert_close(grads[name], p.grad)


def assert_runs_on_own_weights(twin: nn.Module, source: nn.Module, original: nn.Module) -> None:
    """The fast and the slow path of both compute what they should when each has other weights."""
    before = [source(batch(size)) for size in (FAST, SLOW)]
    other = copy.deepcopy(original)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5).add_(0.1)
    twin.load_state_dict(other.state_dict())
    for size, result in zip((FAST, SLOW), before, strict=True):
        assert_close(result, original(batch(size)))
        assert_close(source(batch(size)), result)
        assert_close(twin(batch(size)), other(batch(size)))


def test_deepcopy():
    original, model = make()
    assert_runs_on_own_weights(copy.deepcopy(model), model, original)


def test_copy_of_a_part():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.head = inner, nn.Linear(5, 1)

        def forward(self, x):
            return self.head(self.inner(x))

    torch.manual_seed(0)
    original = Outer(Members()).double()
    model = convert_model(original, (batch(FAST),), verify=False).model
    assert_runs_on_own_weights(copy.deepcopy(model.inner), model.inner, original.inner)


def test_defaults_of_any_kind_survive():
    class Scaled(Members):
        def forward(self, x, factors=[0.5, 2.0], *, sign=-1):  # noqa: B006
            return super().forward(x) * factors[1] * sign

    torch.manual_seed(0)
    original = Scaled().double()
    model = convert_model(original, (batch(FAST),), verify=False).model
    assert_runs_on_own_weights(copy.deepcopy(model), model, original)


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickle(protocol):
    original, model = make()
    assert_runs_on_own_weights(pickle.loads(pickle.dumps(model, protocol)), model, original)


def test_torch_save_of_the_whole_model():
    original, model = make()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_runs_on_own_weights(torch.load(file, weights_only=False), model, original)


def test_state_dict_through_a_file():
    original, model = make()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        fresh = copy.deepcopy(model)
        for p in fresh.parameters():
            p.zero_()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_close(fresh(batch(FAST)), original(batch(FAST)))


def test_to_another_dtype_and_back():
    original, model = make()
    model.float().double()
    original.float().double()
    for size in (FAST, SLOW):
        assert_close(model(batch(size)), original(batch(size)))


def test_averaged_model():
    original, model = make()
    averages = AveragedModel(model), AveragedModel(original)
    for factor in (1.0, 0.5, 3.0):
        for trained, average in zip((model, original), averages, strict=True):
            with torch.no_grad():
                for p in trained.parameters():
                    p.mul_(factor)
            average.update_parameters(trained)
    for size in (FAST, SLOW):
        assert_close(averages[0](batch(size)), averages[1](batch(size)))
        assert_close(model(batch(size)), original(batch(size)))


def replicate(network: nn.Module, count: int) -> list[nn.Module]:
    """Replicas as `torch.nn.parallel.replicate` makes them, with clones in the place of broadcasts."""
    modules = list(network.modules())
    number = {id(module): n for n, module in enumerate(modules)}
    copies = [{id(p): p.clone() for p in network.parameters()} for _ in range(count)]
    replicas = [[] for _ in range(count)]
    for module in modules:
        for j in range(count):
            replicas[j].append(module._replicate_for_data_parallel())
    for n, module in enumerate(modules):
        for j in range(count):
            replica = replicas[j][n]
            for key, child in module._modules.items():
                if child is None:
                    replica._modules[key] = None
                else:
                    setattr(replica, key, replicas[j][number[id(child)]])
            for key, p in module._parameters.items():
                if p is None:
                    replica._parameters[key] = None
                else:
                    setattr(replica, key, copies[j][id(p)])
    return [modules[0] for modules in replicas]


@pytest.mark.parametrize("size", [FAST, SLOW])
@pytest.mark.parametrize("wrapped", [False, True])
def test_replicas_of_data_parallel_run_on_their_own_weights(size, wrapped):
    original, model = make()
    model = nn.Sequential(model) if wrapped else model
    replicas = replicate(model, 2)
    with torch.no_grad():  # the second replica's weights differ, as if they lay on another device
        for module in replicas[1].modules():
            for name in ("weight", "bias"):
                if isinstance(vars(module).get(name), torch.Tensor):
                    vars(module)[name].mul_(0.5)
    half = copy.deepcopy(original)
    with torch.no_grad():
        for p in half.parameters():
            p.mul_(0.5)
    results = [None, None]

    def run(j):
        results[j] = replicas[j](batch(size))

    threads = [threading.Thread(target=run, args=(j,)) for j in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_close(results[0], original(batch(size)))
    assert_close(results[1], half(batch(size)))
    assert_close(model(batch(size)), original(batch(size)))


def test_gradients_reach_the_model_through_a_replica():
    original, model = make()
    for size in (FAST, SLOW):
        replicate(model, 1)[0](batch(size)).square().sum().backward()
        original(batch(size)).square().sum().backward()
    assert_same_gradients(model, original)


def test_a_replicas_head_outside_its_model_says_why_it_cannot_run():
    _, model = make()
    replica = replicate(model, 1)[0]
    head = replica.mean
    assert isinstance(head, FusedLinear) and isinstance(replica.experts, LinearList)
    with pytest.raises(RuntimeError, match="call that first"):
        head(torch.zeros(1, 10, dtype=torch.float64))
    replica(batch(FAST))
    assert_close(
        head(torch.ones(1, 10, dtype=torch.float64)), model.mean(torch.ones(1, 10, dtype=torch.float64))
    )


DDP = """
import sys
sys.path.insert(0, {tests!r})
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from test_life_after import FAST, SLOW, assert_close, batch, make

torch.set_num_threads(1)
original, model = make()

def main(rank):
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
    parallel = DistributedDataParallel(model)
    for size in (FAST, SLOW, FAST):
        parallel(batch(size) + rank).square().mean().backward()
        (sum(original(batch(size) + r).square().mean() for r in range(2)) / 2).backward()
        for p in [*parallel.parameters(), *original.parameters()]:
            p.data -= 0.1 * p.grad
            p.grad = None
    for size in (FAST, SLOW):
        assert_close(model(batch(size)), original(batch(size)))
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(main, nprocs=2, start_method="fork")
"""


def test_two_processes_of_distributed_data_parallel(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(DDP.format(tests=str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("size", [FAST, SLOW])
def test_activation_checkpointing(reentrant, size):
    original, model = make()
    for m, run in ((original, original), (model, lambda x: checkpoint(model, x, use_reentrant=reentrant))):
        x = batch(size).requires_grad_()
        run(x).square().sum().backward()
        m.x_grad = x.grad
    assert_close(model.x_grad, original.x_grad)
    assert_same_gradients(model, original)


def test_compile_of_the_whole_model():
    original, model = make()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in (FAST, SLOW):
        result, expected = compiled(batch(size)), original(batch(size))
        assert_close(result, expected)
        result.square().sum().backward(), expected.square().sum().backward()
    assert_same_gradients(model, original)
    with torch.no_grad():
        for p in [*original.parameters(), *model.parameters()]:
            p.mul_(0.5)
    for size in (FAST, SLOW):
        assert_close(compiled(batch(size)), original(batch(size)))


def halves(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() * 0.5 for name, p in model.named_parameters()}


def test_functional_call():
    original, model = make()
    for size in (FAST, SLOW):
        model(batch(size))
        result = torch.func.functional_call(model, halves(model), (batch(size),))
        assert_close(result, torch.func.functional_call(original, halves(original), (batch(size),)))


def test_func_grad_and_vmap():
    original, model = make()

    def loss(m):
        return lambda weights, x: torch.func.functional_call(m, weights, (x,)).square().sum()

    for size in (FAST, SLOW):
        grads = torch.func.grad(loss(model))(halves(model), batch(size))
        expected = torch.func.grad(loss(original))(halves(original), batch(size))
        assert_close(grads["experts.bias"], torch.stack([expected[f"experts.{n}.bias"] for n in range(5)]))
        several = torch.stack([batch(size), batch(size) * 2])
        grads = torch.vmap(torch.func.grad(loss(model)), (None, 0))(halves(model), several)
        expected = torch.vmap(torch.func.grad(loss(original)), (None, 0))(halves(original), several)
        stacked = torch.stack([expected[f"experts.{n}.weight"] for n in range(5)], 1)
        assert_close(grads["experts.weight"], stacked)
