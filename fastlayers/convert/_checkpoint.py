"""State dicts both ways, and the file of a converted model: safetensors with its plan's facts, never code."""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ._install import join, part_of
from ._types import ConversionError, ParamRef

FORMAT_VERSION = 1


def convert_state_dict(
    state: Mapping[str, Tensor], param_map: Mapping[str, ParamRef], order: Iterable[str]
) -> dict[str, Tensor]:
    """Turn the original model's state dict into the converted one's, bit for bit.

    Raises:
        KeyError: keys of replaced Linears that are missing.
        ValueError: a tensor of another shape.
    """
    groups: dict[str, list[tuple[str, ParamRef]]] = {}
    for old, ref in param_map.items():
        groups.setdefault(ref.name, []).append((old, ref))
    missing = [old for old in param_map if old not in state]
    if missing:
        raise KeyError(f"state dict: missing {_some(missing)}")
    for old, ref in param_map.items():
        if tuple(state[old].shape) != tuple(ref.shape):
            raise ValueError(f"state dict: {old} must be {ref.shape}, got {tuple(state[old].shape)}")
    result = {key: tensor for key, tensor in state.items() if key not in param_map}
    for new, members in groups.items():
        unique = {ref.index: (old, ref) for old, ref in members}.values()
        result[new] = join([state[old] for old, _ in unique], [ref for _, ref in unique])
    return _ordered(result, order)


def restore_state_dict(
    state: Mapping[str, Tensor], param_map: Mapping[str, ParamRef], order: Iterable[str]
) -> dict[str, Tensor]:
    """Turn a converted model's state dict back into the original's, bit for bit.

    Raises:
        KeyError: fused tensors that are missing.
    """
    missing = sorted({ref.name for ref in param_map.values()} - set(state))
    if missing:
        raise KeyError(f"state dict: missing {_some(missing)}")
    fused = {ref.name for ref in param_map.values()}
    result = {key: tensor for key, tensor in state.items() if key not in fused}
    for old, ref in param_map.items():
        result[old] = part_of(state[ref.name], ref).clone()
    return _ordered(result, order)


def _ordered(state: dict[str, Tensor], order: Iterable[str]) -> dict[str, Tensor]:
    first = {key: state[key] for key in order if key in state}
    return {**first, **state}


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def save_file(path: str | os.PathLike[str], state: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
    """Write tensors and facts as safetensors: whole or not at all, through a file beside the target."""
    from safetensors.torch import save_file as write

    target = Path(path)
    tensors, shared = _distinct(state)
    metadata = {
        "format": "pt",
        "fastlayers": json.dumps({"version": FORMAT_VERSION, "shared": shared, **facts}),
    }
    handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent or ".")
    os.close(handle)
    try:
        write(tensors, beside, metadata=metadata)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(beside, 0o666 & ~mask)
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _distinct(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """safetensors holds no tensor twice: names of one tensor are noted, views are copied."""
    first: dict[Any, str] = {}
    tensors, shared = {}, {}
    for name, tensor in state.items():
        key = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
        )
        if tensor.numel() and key in first:
            shared[name] = first[key]
            continue
        first[key] = name
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, shared


def load_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_file` wrote.

    Raises:
        FileNotFoundError: no such file.
        ConversionError: no safetensors file, damaged, or not written by fastlayers (in this version).
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path}: not a readable safetensors file ({error})") from error
    try:
        facts = json.loads(metadata["fastlayers"])
        version = facts["version"]
    except (KeyError, TypeError, ValueError) as error:
        raise ConversionError(
            f"{path}: not written by fastlayers (its metadata says nothing of it)"
        ) from error
    if version != FORMAT_VERSION:
        raise ConversionError(f"{path}: format version {version}, this fastlayers reads {FORMAT_VERSION}")
    for name, same in facts["shared"].items():
        state[name] = state[same]
    return state, facts


def param_map_to_json(param_map: Mapping[str, ParamRef]) -> dict[str, list[Any]]:
    """References as lists."""
    return {old: [ref.name, ref.index, list(ref.shape)] for old, ref in param_map.items()}


def param_map_from_json(value: Mapping[str, Any]) -> dict[str, ParamRef]:
    """The inverse of `param_map_to_json`."""
    return {
        old: ParamRef(name, tuple(index) if isinstance(index, list) else index, tuple(shape))
        for old, (name, index, shape) in value.items()
    }
