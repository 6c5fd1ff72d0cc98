"""MonarchLinear.from_linear: optimal where it can be, bounded where not, and honest about its error."""

from math import prod

import pytest
import torch
from torch import nn

from fastlayers import MonarchLinear
from fastlayers._projection_data import OutputFit, gram_of
from fastlayers._projection_factors import fit_weight


def linear_of(weight: torch.Tensor, bias: bool = False) -> nn.Linear:
    linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=bias, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


def random_weight(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


MONARCH = [
    ((8, 4), (6, 8), 1),
    ((8, 4), (6, 8), 3),
    ((20, 1), (1, 24), 5),
    ((4, 5, 6), (3, 4, 5), 2),
    ((2, 3, 4, 3), (3, 2, 2, 4), 2),
]


@pytest.mark.parametrize("grouping", ["strided", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("in_dims, out_dims, rank", MONARCH, ids=str)
def test_recovers_a_monarch_matrix(in_dims, out_dims, rank, dtype, grouping):
    torch.manual_seed(0)
    sizes = (prod(in_dims), prod(out_dims), in_dims, out_dims)
    target = MonarchLinear(*sizes, rank=rank, grouping=grouping, dtype=dtype).to_dense().detach()
    layer = MonarchLinear.from_linear(
        linear_of(target), in_dims=in_dims, out_dims=out_dims, rank=rank, grouping=grouping
    )
    assert relative(layer.to_dense(), target) < 1e-12
    assert layer.projection.weight_error < 1e-12


@pytest.mark.parametrize("grouping", ["strided", "contiguous"])
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_two_dims_reach_the_optimum(rank, grouping):
    """The error is the tail of the blocks' singular values, taken here from torch's own SVD."""
    weight = random_weight(48, 40)
    (i0, i1), (o0, o1) = (8, 5), (4, 12)
    view = weight.view(o0, o1, i0, i1).permute(0, 3, 1, 2)
    if grouping == "contiguous":
        view = weight.view(o0, o1, i1, i0).permute(0, 2, 1, 3)
    tail = float((torch.linalg.svdvals(view)[..., rank:] ** 2).sum().sqrt() / weight.norm())
    layer = MonarchLinear.from_linear(
        linear_of(weight), in_dims=(i0, i1), out_dims=(o0, o1), rank=rank, grouping=grouping
    )
    assert abs(layer.projection.weight_error - tail) < 1e-10
    assert abs(relative(layer.to_dense(), weight) - tail) < 1e-10
    if rank < 8:
        assert abs(layer.projection.best_possible - tail) < 1e-10
    else:  # the full block
        assert relative(layer.to_dense(), weight) < 1e-13


def test_no_descent_finds_better():
    weight = random_weight(24, 20)
    layer = MonarchLinear.from_linear(linear_of(weight), in_dims=(4, 5), out_dims=(3, 8), rank=2)
    best = relative(layer.to_dense(), weight)
    for _ in range(3):
        other = MonarchLinear(20, 24, (4, 5), (3, 8), rank=2, bias=False, dtype=torch.float64)
        optimizer = torch.optim.LBFGS(other.parameters(), max_iter=300, line_search_fn="strong_wolfe")

        def loss(other=other, optimizer=optimizer):
            optimizer.zero_grad()
            value = (other.to_dense() - weight).square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        assert relative(other.to_dense(), weight) > best - 1e-9


def hadamard(n: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


def dft(n: int) -> torch.Tensor:
    k = torch.arange(n, dtype=torch.float64)
    return torch.exp(-2j * torch.pi * k[:, None] * k / n)


STRUCTURED = {  # matrix, grouping, rank at which theory says it is exact
    "hadamard": (hadamard(64), "strided", 1),
    "hadamard, neighbours": (hadamard(64), "contiguous", 8),
    # The outputs in the order of a decimation in frequency, as in the fast Fourier transform.
    "dft": (dft(64).view(8, 8, 64).transpose(0, 1).reshape(64, 64), "strided", 1),
    "identity": (torch.eye(64, dtype=torch.float64), "contiguous", 8),
    "identity, strided": (torch.eye(64, dtype=torch.float64), "strided", 1),
    "cyclic shift": (torch.eye(64, dtype=torch.float64).roll(1, 0), "strided", 1),
    "block diagonal": (torch.block_diag(*random_weight(8, 8, 8)), "strided", 1),
    "kronecker": (torch.kron(random_weight(8, 8), random_weight(8, 8, seed=1)), "contiguous", 8),
    "two kronecker terms": (
        torch.kron(random_weight(8, 8), random_weight(8, 8, seed=1))
        + torch.kron(random_weight(8, 8, seed=2), random_weight(8, 8, seed=3)),
        "strided",
        2,
    ),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_matrices_are_exact_at_their_rank(name):
    matrix, grouping, rank = STRUCTURED[name]

    def error(rank):
        layer = MonarchLinear.from_linear(
            linear_of(matrix), in_dims=(8, 8), out_dims=(8, 8), rank=rank, grouping=grouping
        )
        return relative(layer.to_dense(), matrix)

    assert error(rank) < 1e-12
    if rank > 1:
        assert error(rank - 1) > 1e-3


@pytest.mark.parametrize("dims", [((6, 5, 8), (5, 6, 8)), ((4, 4, 4, 4), (4, 4, 4, 4))], ids=str)
def test_sweeps_lower_the_error_and_the_bound_holds(dims):
    weight = random_weight(prod(dims[1]), prod(dims[0]))
    plain = fit_weight(weight, *dims, 2, "strided", sweeps=0)
    once = fit_weight(weight, *dims, 2, "strided", sweeps=1)
    swept = fit_weight(weight, *dims, 2, "strided")
    assert swept.error <= once.error <= plain.error
    assert swept.error < 0.997 * plain.error
    assert plain.error <= (len(dims[0]) - 1) ** 0.5 * swept.error
    assert plain.least_error <= swept.error
    noisy = MonarchLinear(240, 240, (6, 5, 8), (5, 6, 8), rank=2, dtype=torch.float64).to_dense().detach()
    noise = random_weight(240, 240)
    noisy = noisy + 0.1 * noise * noisy.norm() / noise.norm()
    fit = fit_weight(noisy, (6, 5, 8), (5, 6, 8), 2, "strided")
    assert fit.least_error < fit.error < 0.1 * noisy.norm()


def test_a_trained_weight_in_three_dims():
    """The weights of a small network trained here, so that the gain does not rest on Gaussian ones alone."""
    torch.manual_seed(0)
    x = torch.randn(512, 64)
    y = torch.tanh(x @ torch.randn(64, 8)) @ torch.randn(8, 27)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 27))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(200):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    weight = net[0].weight.detach().double()
    plain = fit_weight(weight, (4, 4, 4), (4, 4, 4), 1, "strided", sweeps=0)
    assert fit_weight(weight, (4, 4, 4), (4, 4, 4), 1, "strided").error < 0.997 * plain.error


def correlated_inputs(tokens: int, features: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    mix = torch.linalg.qr(torch.randn(features, features, generator=g, dtype=torch.float64))[0]
    scale = torch.arange(1, features + 1, dtype=torch.float64) ** -0.75
    g.manual_seed(seed)
    return (torch.randn(tokens, features, generator=g, dtype=torch.float64) * scale) @ mix.T


@pytest.mark.parametrize("grouping", ["strided", "contiguous"])
@pytest.mark.parametrize(
    "dims, rank",
    [
        (
            (
                (16, 6),
                (6, 12),
            ),
            3,
        ),
        (((96, 1), (1, 72)), 12),
    ],
    ids=str,
)
def test_data_aware_lowers_the_held_out_error(dims, rank, grouping):
    weight = random_weight(72, 96)
    calibration, held_out = correlated_inputs(2000, 96, 1), correlated_inputs(2000, 96, 2)
    args = {"in_dims": dims[0], "out_dims": dims[1], "rank": rank, "grouping": grouping}
    plain = MonarchLinear.from_linear(linear_of(weight), **args)
    aware = MonarchLinear.from_linear(linear_of(weight), **args, calibration=iter(calibration.split(300)))

    def error(layer, x):
        return relative(layer(x), x @ weight.T)

    assert error(aware, held_out) < 0.8 * error(plain, held_out)
    assert aware.projection.method == "data-aware" and aware.projection.best_possible is None
    assert abs(aware.projection.output_error - error(aware, calibration)) < 1e-9
    assert aware.projection.weight_error > plain.projection.weight_error
    same = MonarchLinear.from_linear(linear_of(weight), **args, gram=gram_of(calibration, 96))
    assert relative(same.to_dense(), aware.to_dense()) < 1e-6


def test_every_step_of_the_data_aware_fit_lowers_the_loss():
    weight, x = random_weight(48, 60), correlated_inputs(1000, 60, 1)
    data = OutputFit(weight, gram_of(x, 60), (10, 6), (4, 12), "strided")
    losses = [data.fit(2, sweeps)[1] for sweeps in (0, 1, 2, 4)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.98 * losses[0]
    factors, loss = data.fit(2)
    layer = MonarchLinear(60, 48, (10, 6), (4, 12), rank=2, bias=False, dtype=torch.float64)
    layer.load_state_dict({f"weights.{k}": w for k, w in enumerate(factors)})
    assert abs((layer(x) - x @ weight.T).square().sum() / 1000 / loss - 1) < 1e-5


@pytest.mark.parametrize("dims", [((10, 6), (4, 12)), ((5, 4, 3), (4, 3, 4)), None], ids=str)
def test_a_weight_tolerance_gives_the_least_rank(dims):
    weight = random_weight(48, 60) * torch.linspace(1, 0.01, 60, dtype=torch.float64)
    args = {} if dims is None else {"in_dims": dims[0], "out_dims": dims[1]}
    layer = MonarchLinear.from_linear(linear_of(weight), weight_tolerance=0.3, **args)
    assert relative(layer.to_dense(), weight) <= 0.3
    if layer.rank > 1:
        less = MonarchLinear.from_linear(
            linear_of(weight), in_dims=layer.in_dims, out_dims=layer.out_dims, rank=layer.rank - 1
        )
        assert less.projection.weight_error > 0.3


@pytest.mark.parametrize("dims", [((10, 6), (4, 12)), None], ids=str)
def test_an_output_tolerance_is_kept_by_the_outputs(dims):
    weight, x = random_weight(48, 60), correlated_inputs(1500, 60, 1)
    args = {} if dims is None else {"in_dims": dims[0], "out_dims": dims[1]}
    layer = MonarchLinear.from_linear(linear_of(weight), output_tolerance=0.2, calibration=x, **args)
    assert relative(layer(x), x @ weight.T) <= 0.2
    less = MonarchLinear.from_linear(
        linear_of(weight), in_dims=layer.in_dims, out_dims=layer.out_dims, rank=layer.rank - 1, calibration=x
    )
    assert less.projection.output_error > 0.2


def test_a_share_of_the_parameters():
    weight = random_weight(48, 60)
    layer = MonarchLinear.from_linear(linear_of(weight), params=0.25, grouping=None)
    assert sum(w.numel() for w in layer.weights) <= 0.25 * 48 * 60 == 720
    record = layer.projection
    assert (record.parameters_before, record.parameters_after) == (
        2880,
        sum(w.numel() for w in layer.weights),
    )
    assert record.rank == layer.rank and record.time_s > 0
    low_rank = MonarchLinear.from_linear(linear_of(weight), in_dims=(60, 1), out_dims=(1, 48), params=0.25)
    assert low_rank.rank == 6  # floor(720 / 108)
    assert record.weight_error <= low_rank.projection.weight_error


def test_prime_sizes_and_what_carries_over():
    torch.manual_seed(0)
    linear = nn.Linear(101, 53).eval()
    linear.weight.requires_grad_(False)
    layer = MonarchLinear.from_linear(linear, in_dims=(26, 4), out_dims=(4, 14), rank=14)
    assert relative(layer.to_dense(), linear.weight) < 1e-6
    assert torch.equal(layer.bias, linear.bias) and layer.bias.requires_grad
    assert not layer.weights[0].requires_grad and not layer.training
    half = MonarchLinear.from_linear(nn.Linear(12, 12).bfloat16(), in_dims=(3, 4), out_dims=(4, 3), rank=3)
    assert half.weights[0].dtype == torch.bfloat16
    # The record is of the factors as stored: rounding shows.
    assert 1e-4 < half.projection.weight_error < 1e-2


def test_the_record_reads_well():
    layer = MonarchLinear.from_linear(nn.Linear(60, 48), in_dims=(10, 6), out_dims=(4, 12), rank=2)
    text = str(layer.projection)
    assert text.startswith("(10, 6) -> (4, 12), rank 2, strided: 36.7% of the parameters, weight error 0.")
    assert text.endswith("(optimal blocks)")


BAD = [
    ({"rank": 2, "params": 0.5}, "rank and params each set the rank: give one of them"),
    ({}, "say how small or how exact: rank, params, weight_tolerance, output_tolerance, or the dims"),
    ({"params": 0.001}, "no Monarch layer of 12 -> 12 has at most 0.10% of its 144 parameters"),
    ({"output_tolerance": 0.1}, "output_tolerance needs calibration inputs, or their gram"),
    ({"in_dims": (3, 4), "rank": 1}, "give in_dims and out_dims, or neither"),
    ({"rank": -1}, "rank must be positive, got -1"),
    ({"rank": 1, "grouping": "both"}, 'grouping must be "strided", "contiguous" or None (the better)'),
    ({"rank": 1, "gram": torch.eye(3)}, "gram must be (12, 12), got (3, 3)"),
    ({"rank": 1, "gram": torch.eye(12), "calibration": torch.eye(12)}, "calibration and gram say the same"),
    ({"rank": 1, "calibration": torch.eye(3)}, "inputs must be (*, 12), got (3, 3)"),
    ({"rank": 1, "calibration": []}, "it gave no inputs"),
]


@pytest.mark.parametrize("args, text", BAD, ids=[t[:40] for _, t in BAD])
def test_refused(args, text):
    with pytest.raises(ValueError) as info:
        MonarchLinear.from_linear(nn.Linear(12, 12), **args)
    assert text in str(info.value)


def test_refuses_what_is_no_linear():
    with pytest.raises(TypeError, match=r"linear must be an nn\.Linear, got Conv2d"):
        MonarchLinear.from_linear(nn.Conv2d(1, 1, 1), rank=1)
