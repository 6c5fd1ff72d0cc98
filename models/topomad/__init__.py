"""TopoMAD: find anomalies in a cloud system from the metrics of its nodes and the graph between them."""

from .detector import Alarm, TopoMAD
from .model import GraphLSTMVAE
from .paper_checkpoint import load_paper_checkpoint

__all__ = ["Alarm", "GraphLSTMVAE", "TopoMAD", "load_paper_checkpoint"]
