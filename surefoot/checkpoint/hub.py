"""Folders in the layout of the Hugging Face hub: config.json, and tensors in one or several safetensors files.

Nothing else of a folder is opened: pickles run code, and a model's own Python files are never looked at.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from surefoot.checkpoint.manifest import reason
from surefoot.config import CheckpointError
from surefoot.models.hf.family import Family
from surefoot.models.initialise import named_states, named_weights
from surefoot.models.multimodal import ModelConfig

SETTINGS = "config.json"
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Published:
    """An opened folder: the settings, and in which file each tensor lies."""

    path: Path
    settings: dict[str, Any]
    files: Mapping[str, Path]


def open_published(path: Path) -> Published:
    """A folder's settings and names; `CheckpointError` names the file that is absent, foreign or damaged."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: is not a folder; name one that holds {SETTINGS} and {_ONE}")
    settings, index = _read_object(path / SETTINGS), path / _INDEX
    if not index.is_file():
        if not (path / _ONE).is_file():
            pickled = next((file.name for file in sorted(path.glob("*.bin"))), None)
            instead = f" ({pickled} is a pickle, which could run code and is not read)" if pickled else ""
            raise CheckpointError(f"{path}: has no {_ONE}{instead}; save the model as safetensors")
        return Published(path, settings, dict.fromkeys(_names(path / _ONE), path / _ONE))
    table = _read_object(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise CheckpointError(f"{index}: has no weight_map of names to files; fetch it again")
    for file in sorted(set(table.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {file!r} is not the plain name of a safetensors file; fetch it again")
        inside, said = _names(path / file), {name for name, place in table.items() if place == file}
        if odd := sorted(inside ^ said):
            where = "holds" if odd[0] in inside else "lacks"
            raise CheckpointError(f"{path / file}: {where} {odd[0]}, unlike {_INDEX} says; fetch both again")
    return Published(path, settings, {name: path / file for name, file in table.items()})


def read_published(published: Published, family: Family, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights and states of a decoder in `dtype`, by our names.

    Names, shapes and dtypes are all compared before a tensor is read: `CheckpointError` names the first that differs.
    """
    ties, own = family.ties(config), _own(config)
    expected = {
        name: tuple(meta.shape)
        for tie in ties
        for name, meta in zip(tie.theirs, tie.to_theirs([own[ours] for ours in tie.ours]), strict=True)
    }
    place = f"{published.path}: model.safetensors"
    if lacking := sorted(expected.keys() - published.files.keys()):
        raise CheckpointError(f"{place}: lacks {lacking[0]}, which {family.name} needs; fetch it again")
    if unused := sorted(published.files.keys() - expected.keys()):
        raise CheckpointError(
            f"{place}: holds {unused[0]}, for which this {family.name} has no place; check {SETTINGS}, or save the model again"
        )
    with ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(file, framework="pt")) for file in sorted(set(published.files.values()))
        }
        for name, shape in expected.items():
            file = published.files[name]
            entry = opened[file].get_slice(name)
            if tuple(entry.get_shape()) != shape:
                raise CheckpointError(f"{file}: {name} is {tuple(entry.get_shape())}, not {shape}; check {SETTINGS}")
            if entry.get_dtype() not in DTYPES:
                raise CheckpointError(
                    f"{file}: {name} is {entry.get_dtype()}; only {', '.join(DTYPES)} are read, so save it unquantised"
                )
        found: dict[str, Tensor] = {}
        for tie in ties:
            theirs = [opened[published.files[name]].get_tensor(name) for name in tie.theirs]
            for name, tensor in zip(tie.ours, tie.to_ours(theirs), strict=True):
                # A view of a mapped file must not outlive it.
                found[name] = tensor.to(torch.promote_types(dtype, own[name].dtype), copy=True).contiguous()
    return found


def theirs_of(
    family: Family, config: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of a published model out of a decoder's, weights in `dtype` and states in their own."""
    states = {name for name, _, _ in named_states(_meta(config))}
    found: dict[str, Tensor] = {}
    for tie in family.ties(config):
        kept = any(name in states for name in tie.ours)
        for name, tensor in zip(tie.theirs, tie.to_theirs([tensors[ours] for ours in tie.ours]), strict=True):
            found[name] = tensor.to(tensor.dtype if kept else dtype).clone(memory_format=torch.contiguous_format)
    return found


def write_published(path: Path, settings: Mapping[str, Any], theirs: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Put settings and tensors into an existing folder."""
    named = {key: value for key, value in settings.items() if key != "torch_dtype"}
    named["dtype"] = str(dtype).removeprefix("torch.")
    try:
        save_file(dict(theirs), path / _ONE, metadata={"format": "pt"})
        (path / SETTINGS).write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written ({error}); make room or give --out another place") from None


def copy_beside(source: Path, target: Path, names: tuple[str, ...]) -> list[str]:
    """Copy those plain files of a folder that are there, and return their names."""
    there = [name for name in names if (source / name).is_file()]
    for name in there:
        shutil.copyfile(source / name, target / name)
    return there


def _meta(config: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        return config.build()


def _own(config: ModelConfig) -> dict[str, Tensor]:
    model = _meta(config)
    return {name: getattr(block, own).detach() for name, block, own in (*named_weights(model), *named_states(model))}


def _names(file: Path) -> set[str]:
    try:
        with safe_open(file, framework="pt") as stream:
            return set(stream.keys())
    except (OSError, SafetensorError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        raise CheckpointError(f"{file}: is not a readable safetensors file ({why}); fetch it again") from None


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: is not an object; fetch it again")
    return value
