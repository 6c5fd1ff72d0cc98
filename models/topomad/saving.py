"""A fitted detector as one safetensors file: tensors, and all else as JSON in its header."""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .data import Scaler, name_pairs, read_edges
from .detector import TopoMAD
from .training import Epoch

FORMAT = 1
KEY = "topomad"


def save_detector(detector: TopoMAD, path: str | os.PathLike[str]) -> None:
    """Write a fitted detector, whole or not at all."""
    facts = {
        "format": FORMAT,
        "parameters": detector.get_params() | {"device": "auto"},
        "nodes": detector.nodes_,
        "metrics": detector.metrics_,
        "edges": list(name_pairs(detector.edge_index_, detector.nodes_)),
        "history": [list(epoch) for epoch in detector.history_],
    }
    tensors = {f"model.{name}": tensor for name, tensor in detector.model_.list_state_dict().items()}
    tensors |= {"scaler.mean": detector._scaler.mean, "scaler.std": detector._scaler.std}
    tensors["decision_scores"] = detector._train_scores
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    unfinished = Path(f"{os.fspath(path)}.part")
    save_file(whole, unfinished, metadata={KEY: json.dumps(facts)})
    os.replace(unfinished, path)


def load_detector(path: str | os.PathLike[str], device: str | torch.device) -> TopoMAD:
    """Read what `save_detector` wrote, onto a device."""
    name = os.fspath(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{name}: not a safetensors file ({error})") from error
    if KEY not in header:
        raise ValueError(f"{name}: a safetensors file, but not of a TopoMAD detector")
    facts = json.loads(header[KEY])
    if facts["format"] > FORMAT:
        raise ValueError(f"{name}: format {facts['format']}, but only formats up to {FORMAT} are known")
    detector = TopoMAD(**facts["parameters"]).set_params(device=device)
    detector.nodes_, detector.metrics_ = tuple(facts["nodes"]), tuple(facts["metrics"])
    detector.edge_index_ = read_edges([tuple(pair) for pair in facts["edges"]], detector.nodes_)
    detector.history_ = [Epoch(*epoch) for epoch in facts["history"]]
    detector._scaler = Scaler(tensors["scaler.mean"], tensors["scaler.std"], detector.clip)
    detector._train_scores = tensors["decision_scores"]
    with torch.device("meta"):
        model = detector._build()
    weights = {key[6:]: tensor for key, tensor in tensors.items() if key.startswith("model.")}
    model.load_state_dict(weights, assign=True)
    detector.model_ = model.to(detector._device()).eval()
    detector.reset_stream()
    return detector
