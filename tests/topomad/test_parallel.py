"""Two processes train to the same weights as one."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from models.topomad import GraphLSTMVAE
from models.topomad.training import Trainer, TrainingSettings

# 3 * 7 + 1 windows: the last batch holds one, fewer than there are processes.
SETTINGS = TrainingSettings(window=4, epochs=3, batch_size=7, learning_rate=1e-2, validation_share=0.2)
ROWS = 32
EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])


def trained(checkpoint=None):
    """Train a small model in float64; give its weights and the training losses."""
    generator = torch.Generator().manual_seed(0)
    series = torch.randn(ROWS, 3, 2, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = GraphLSTMVAE("GCN", 3, 2, 3).double()
    trainer = Trainer(model, series, model.prepare_graph(EDGES), SETTINGS)
    assert len(trainer.train_starts) % SETTINGS.batch_size == 1
    history = trainer.run(checkpoint)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return weights, torch.tensor([epoch.train_loss for epoch in history], dtype=torch.float64)


def train_in_one_of_two(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.save(trained(f"{folder}/checkpoint.pt"), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_train_as_one(tmp_path):
    mp.spawn(train_in_one_of_two, args=(str(tmp_path),), nprocs=2)
    weights, losses = trained()
    for rank in range(2):
        theirs, their_losses = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert (theirs - weights).abs().max() <= 1e-10 * weights.abs().max()
        assert (their_losses - losses).abs().max() <= 1e-10 * losses.abs().max()
    history = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["history"]
    assert len(history) == SETTINGS.epochs
