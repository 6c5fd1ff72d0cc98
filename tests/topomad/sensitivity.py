"""How much a model's numbers move under changes too small for float32 to hold: what no rounding can avoid."""

import copy

import torch

TRIALS = 3


def one_ulp_envelope(model, windows, numbers_of):
    """Give, for each name of `numbers_of(model64, windows64)`, the largest change per element.

    Weights and windows are moved at random by at most one float32 rounding; everything is run in float64.
    """
    generator = torch.Generator().manual_seed(0)

    def moved(tensor):
        sign = torch.randint(-1, 2, tensor.shape, generator=generator)
        return tensor.double() * (1 + sign * torch.finfo(torch.float32).eps / 2)

    still = numbers_of(copy.deepcopy(model).double(), windows.double())
    envelope = {name: torch.zeros_like(tensor) for name, tensor in still.items()}
    for _ in range(TRIALS):
        twin = copy.deepcopy(model).double()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.copy_(moved(parameter))
        for name, tensor in numbers_of(twin, moved(windows)).items():
            envelope[name] = torch.maximum(envelope[name], (tensor - still[name]).abs())
    return still, {name: tensor.max() for name, tensor in envelope.items()}
