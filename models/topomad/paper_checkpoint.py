"""Checkpoints of the authors' public TopoMAD: state dicts whose keys and shapes tell the whole model."""

import re
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .model import GraphLSTMVAE

_NODE_KEY = re.compile(r"(mu|logvar|hidden2output|hidden2output_logvar)\.(\d+)\.(weight|bias)")
_CELL_KEY = re.compile(r"(encoder|decoder)\.cell_list\.(\d+)\.gconv\.(.+)")
# The weight that tells a kind; GAT's name is that of torch-geometric before 2.5 in the last row.
_KIND_KEYS = (("att_src", "GAT"), ("lin_rel.weight", "WL1"), ("lin.weight", "GCN"), ("weight", "LIN"))
_SHOWN_KEYS = 12


def load_paper_checkpoint(path: str | PathLike[str]) -> GraphLSTMVAE:
    """Read a checkpoint of the authors' code into a `GraphLSTMVAE` in paper mode.

    The kind of the graph layers and all sizes are read off the file's keys and shapes. Dropout of the
    attention leaves no trace there: it is 0 in the returned model, which is in training mode, as a new module
    is. The file is read with `weights_only=True`, onto the CPU. The global random state is not touched.

    Raises:
        ValueError: the file is no readable state dict, is truncated, or belongs to another model; the message
            lists the missing and the unexpected keys and the tensors of another shape.
    """
    state = _unify_names(_read(Path(path)))
    configuration = _read_configuration(state, path)
    with torch.device("meta"):
        model = GraphLSTMVAE(**configuration, mode="paper")
    expected = model.state_dict()
    missing = [key for key in expected if key not in state]
    unexpected = [key for key in state if key not in expected]
    misshapen = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(tensor.shape)}"
        for key, tensor in expected.items()
        if key in state and state[key].shape != tensor.shape
    ]
    if missing or unexpected or misshapen:
        raise _refusal(path, missing, unexpected, misshapen)
    dtypes = {tensor.dtype for tensor in state.values()}
    if len(dtypes) > 1 or not state["hidden2output.0.weight"].is_floating_point():
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(f"{path}: expected tensors of one floating dtype, got {names}")
    model.load_state_dict(state, assign=True)
    return model


def _read(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch.load raises many types for a file that is cut or is something else
        raise ValueError(f"{path}: not a readable checkpoint ({type(error).__name__}: {error})") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path}: expected a state dict of tensors, got {_describe(state)}")
    return dict(state)


def _describe(value: Any) -> str:
    if not isinstance(value, dict):
        return type(value).__name__
    other = [
        f"{key!r} ({type(item).__name__})" for key, item in value.items() if not isinstance(item, Tensor)
    ]
    return "a dict that also holds " + ", ".join(other[:_SHOWN_KEYS])


def _unify_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give GAT's weight its present name: torch-geometric 2.0 to 2.4 called it lin_src, and lin_dst again."""
    unified = {}
    for key, tensor in state.items():
        if key.endswith(".gconv.lin_dst.weight"):
            source = state.get(key.replace("lin_dst", "lin_src"))
            if source is not None and torch.equal(source, tensor):
                continue
        unified[key.replace(".gconv.lin_src.weight", ".gconv.lin.weight")] = tensor
    return unified


def _read_configuration(state: dict[str, Tensor], path: str | PathLike[str]) -> dict[str, Any]:
    """Read the arguments of `GraphLSTMVAE` off the first encoder cell and the highest index of each list."""
    cells = [match for match in map(_CELL_KEY.fullmatch, state) if match]
    nodes = [match for match in map(_NODE_KEY.fullmatch, state) if match]
    first = {m[3]: state[m[0]] for m in cells if (m[1], m[2]) == ("encoder", "0")}
    kind = next((kind for name, kind in _KIND_KEYS if name in first), None)
    weight = first.get({"LIN": "weight", "WL1": "lin_rel.weight"}.get(kind or "", "lin.weight"))
    if kind is None or weight is None or weight.dim() != 2 or not nodes:
        expected = ["encoder.cell_list.0.gconv.*", "decoder.cell_list.0.gconv.*", "hidden2output.0.weight"]
        patterns = {"encoder": expected[0], "decoder": expected[1]}
        present = {patterns[m[1]] for m in cells if m[2] == "0"} | {m[0] for m in nodes}
        foreign = [key for key in state if not _CELL_KEY.fullmatch(key) and not _NODE_KEY.fullmatch(key)]
        raise _refusal(path, [key for key in expected if key not in present], foreign, [])

    def heads(part: str) -> int:
        attention = state.get(f"{part}.cell_list.0.gconv.att_src")
        return attention.shape[1] if attention is not None and attention.dim() == 3 else 1

    heads_of_encoder = heads("encoder")
    hidden_features = max(weight.shape[0] // (4 * heads_of_encoder), 1)
    last_cell = max(int(match[2]) for match in cells)
    bias_key = "lin_rel.bias" if kind == "WL1" else "bias"
    return {
        "kind": kind,
        "num_nodes": max(int(match[2]) for match in nodes) + 1,
        "in_features": max(weight.shape[1] - hidden_features, 1),
        "hidden_features": hidden_features,
        "num_layers": (last_cell + 1, last_cell + 1),
        "heads": (heads_of_encoder, heads("decoder")),
        "bias": (bias_key in first, any(match[3] == "bias" for match in nodes)),
        "variational": any(match[1] != "hidden2output" for match in nodes),
    }


def _refusal(
    path: str | PathLike[str], missing: list[str], unexpected: list[str], misshapen: list[str]
) -> ValueError:
    lines = [f"{path}: not a whole checkpoint of TopoMAD"]
    for what, entries in (("missing", missing), ("unexpected", unexpected), ("another shape", misshapen)):
        if entries:
            more = f" and {len(entries) - _SHOWN_KEYS} more" if len(entries) > _SHOWN_KEYS else ""
            lines.append(f"  {what}: {', '.join(entries[:_SHOWN_KEYS])}{more}")
    return ValueError("\n".join(lines))
