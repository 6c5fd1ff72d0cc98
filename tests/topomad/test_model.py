"""GraphLSTMVAE refuses what it cannot take, and does what its options say."""

import pytest
import torch

from models.topomad import GraphLSTMVAE

EDGES = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]])


@pytest.fixture
def model():
    return GraphLSTMVAE("LIN", 3, 4, 2)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("XYZ", 3, 4, 2), {}, "kind must be one of GCN, GAT, WL1, LIN, got 'XYZ'"),
        (("LIN", 0, 4, 2), {}, "num_nodes must be at least 1, got 0"),
        (("LIN", 3, 4, 0), {}, "hidden_features must be at least 1, got 0"),
        (("LIN", 3, 4, 2), {"num_layers": (1, 2)}, r"num_layers must be two equal numbers .* got \(1, 2\)"),
    ],
)
def test_bad_sizes_are_refused(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        GraphLSTMVAE(*arguments, **settings)


def test_bad_input_is_refused(model):
    with pytest.raises(ValueError, match=r"windows must be .* \(\*, \*, 3, 4\), got \(2, 5, 4, 3\)"):
        model(torch.zeros(2, 5, 4, 3), EDGES)
    with pytest.raises(ValueError, match=r"edge_index must be \(2, E\), got \(4, 2\)"):
        model(torch.zeros(2, 5, 3, 4), EDGES.T)


def test_teacher_forcing_is_for_training_only(model):
    windows, eps = torch.randn(2, 5, 3, 4), torch.randn(2, 3, 2)
    forced, free = (model(windows, EDGES, use, eps=eps)[0] for use in (True, False))
    assert torch.equal(forced[:, -1], free[:, -1]) and not torch.equal(forced[:, -2], free[:, -2])
    model.eval()
    forced = model(windows, EDGES, True, eps=eps)[0]
    assert torch.equal(forced, free)


def test_an_empty_batch_and_a_window_of_one_step(model):
    output, latent, mu, logvar, output_logvar = model(torch.zeros(0, 5, 3, 4), EDGES)
    assert output.shape == output_logvar.shape == (0, 5, 3, 4)
    assert latent.shape == mu.shape == logvar.shape == (0, 3, 2)
    assert model(torch.zeros(2, 1, 3, 4), EDGES)[0].shape == (2, 1, 3, 4)
