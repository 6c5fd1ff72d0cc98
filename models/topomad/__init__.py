"""TopoMAD: find anomalies in a cloud system from the metrics of its nodes and the graph between them."""

from .model import GraphLSTMVAE
from .paper_checkpoint import load_paper_checkpoint

__all__ = ["GraphLSTMVAE", "load_paper_checkpoint"]
