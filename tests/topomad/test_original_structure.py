"""What the benchmarks measure against is the authors' model: the same numbers as the paper mode."""

import pytest
import torch

pytest.importorskip("torch_geometric", reason="the authors' structure is built on torch-geometric")

from benchmarks.topomad_original import OriginalStructure
from models.topomad import GraphLSTMVAE


@pytest.mark.parametrize("kind", ["GCN", "GAT", "WL1", "LIN"])
@pytest.mark.parametrize("variational", [True, False])
def test_the_original_structure_gives_the_paper_modes_numbers(kind, variational):
    torch.manual_seed(0)
    settings = {"heads": (2, 2) if kind == "GAT" else (1, 1), "variational": variational}
    original = OriginalStructure(kind, 5, 4, 3, **settings)
    paper = GraphLSTMVAE(kind, 5, 4, 3, mode="paper", **settings)
    paper.load_state_dict(original.state_dict())
    windows, edges = torch.randn(3, 6, 5, 4), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    eps = torch.randn(3, 5, 3)
    for training, forced in ((True, True), (True, False), (False, True)):
        results = []
        for model in (original.double(), paper.double()):
            model.train(training)
            results.append(model(windows.double(), edges, forced, eps=eps.double()))
        for a, b in zip(*results, strict=True):
            assert (a - b).abs().max() <= 1e-12 * b.abs().max()
