"""Checkpoints: one safetensors file with the recode recipe in its header. No pickle anywhere."""

from __future__ import annotations

import json
import os
from collections import Counter
from inspect import signature
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from neurocoder.conditional import KINDS, Conditional
from neurocoder.program.layer import ProgramLayer
from neurocoder.program.options import from_json
from neurocoder.surgery import REPLACEABLE, build, freeze_bases, refusal, swap
from neurocoder.walk import conditional_layers, named_modules, unwrap

FORMAT = 1
FIELDS = {"name": str, "layer": str, "options": dict, "base": str, "memory": str | None}  # of a layer in the recipe


def save(model: nn.Module, file: str | os.PathLike) -> None:
    """Write every tensor of the model, and how its layers were re-coded, to one safetensors file.

    The file appears whole or not at all. Tensors that several names share are written once.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"save takes a model and a file, got {type(model).__name__} first")
    model = unwrap(model)
    tensors, aliases = _distinct(model.state_dict())
    header = {"format": FORMAT, "layers": _recipe(model), "aliases": aliases}
    path = Path(file)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder")
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
        pass
    try:
        save_file(tensors, temporary.name, metadata={"neurocoder": json.dumps(header)})
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary.name, 0o666 & ~mask)  # a temporary file is its owner's alone
        os.replace(temporary.name, path)
    except BaseException:
        Path(temporary.name).unlink(missing_ok=True)
        raise


def load(model: nn.Module, file: str | os.PathLike) -> nn.Module:
    """Fill `model` from a file written by `save`, re-coding its plain layers first where the file says so.

    The model is changed only once the file has proved to fit it. Returns the model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"load takes a model and a file, got {type(model).__name__} first")
    header, tensors = _read(Path(file))
    plain = unwrap(model)
    replacements = _replacements(plain, header["layers"], file)
    undo = swap(plain, replacements)
    try:
        mine, theirs = _recipe(plain), header["layers"]
        if len(mine) != len(theirs) or not all(map(_same, mine, theirs)):
            raise ValueError(f"{file}: its layers share memories otherwise than those of this model")
        _fill(plain, tensors, header["aliases"], file)
    except BaseException:
        undo()
        raise
    freeze_bases(replacements.values())
    return model


def _replacements(model: nn.Module, entries: list[dict[str, Any]], file: Any) -> dict[nn.Module, Conditional]:
    """The layers that the recipe asks for where the model has plain ones."""
    modules, refuse = dict(named_modules(model)), refusal(model)
    replacements: dict[nn.Module, Conditional] = {}
    memories: dict[str, nn.Module] = {}
    for entry in entries:
        name = entry["name"]
        old = modules.get(name)
        if isinstance(old, Conditional) and _same(_entry(name, old, {}), entry | {"memory": None}):
            new = old
        elif isinstance(old, REPLACEABLE) and name:
            try:
                refuse(name, old)
                new = replacements[old] = _rebuild(old, entry, memories)
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise ValueError(f"{file}: its recipe for {name!r} does not work here: {error}") from error
        else:
            has = "nothing" if old is None else f"{type(old).__name__}, of other options or not to be replaced"
            raise ValueError(f"{file}: its recipe re-codes {name!r}, where this model has {has}")
        if entry["memory"]:
            store = _store(new)
            if store is None:
                raise ValueError(f"{file}: its recipe is malformed: {name!r} has nothing to share")
            memories.setdefault(entry["memory"], store)
    return replacements


def _store(layer: Conditional) -> nn.Module | None:
    """What the layer may share with others: a program memory, or a pool of modules."""
    return None if layer.store is None else getattr(layer, layer.store)


def _recipe(model: nn.Module) -> list[dict[str, Any]]:
    shared: dict[nn.Module, str] = {}
    layers = [*conditional_layers(model)]
    counts = Counter(_store(layer) for _, layer in layers)
    for name, layer in layers:
        store = _store(layer)
        if store is not None and counts[store] > 1:
            shared.setdefault(store, name)
    return [_entry(name, layer, shared) for name, layer in layers]


def _entry(name: str, layer: Conditional, shared: dict[nn.Module, str]) -> dict[str, Any]:
    known = [name for name, kind in KINDS.items() if kind is type(layer)]
    if not known:
        raise TypeError(
            f"{name} is a {type(layer).__name__}, a layer this library cannot rebuild from a file: put @nc.register "
            f"above its class; known are {', '.join(sorted(KINDS))}"
        )
    store = _store(layer)
    entry = {
        "name": name,
        "layer": known[-1],
        "options": layer.options(),
        "base": "replace" if getattr(layer, "base", None) is None else "frozen",
        "memory": None if store is None else shared.get(store),
    }
    return json.loads(json.dumps(entry))


def _same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two entries are of equal layers. A file that is older than an option means its default."""
    parameters, given = signature(KINDS[mine["layer"]]).parameters, theirs["options"]
    late = [parameters[name] for name in mine["options"] if name not in given and name in parameters]
    defaults = {option.name: option.default for option in late if option.default is not option.empty}
    return mine == theirs | {"options": json.loads(json.dumps(defaults)) | given}


def _rebuild(old: nn.Module, entry: dict[str, Any], memories: dict[str, nn.Module]) -> Conditional:
    if entry["layer"] not in KINDS:
        raise ValueError(
            f"unknown layer {entry['layer']!r} in the recipe; known are {', '.join(sorted(KINDS))}. If it is of "
            "another package, import that first: nc.register lets load know its layers"
        )
    kind, options = KINDS[entry["layer"]], entry["options"]
    if issubclass(kind, ProgramLayer):
        options = from_json(options)
    if entry["memory"] in memories and kind.store is not None:
        options = options | {kind.store: memories[entry["memory"]]}
    return build(old, kind, entry["base"], options)


def _distinct(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple, str] = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        if place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensors, aliases


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get("neurocoder")
            if header is None:
                raise ValueError(f"{path}: a safetensors file, but not one written by nc.save: it holds no recipe")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file, cut short or of another kind ({error})") from None
    try:
        header = json.loads(header)
        known = header["format"] == FORMAT
    except (ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise ValueError(f"{path}: its recipe is of another version; this one reads format {FORMAT}")
    try:
        whole = _well_formed(header["layers"], header["aliases"], tensors)
    except (TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{path}: its recipe is malformed")
    return header, tensors


def _well_formed(entries: list[dict[str, Any]], aliases: dict[str, str], tensors: dict[str, Tensor]) -> bool:
    """Whether a recipe says what it must; raises where it is of another kind altogether."""
    names = [entry["name"] for entry in entries]
    return (
        all(isinstance(entry[field], kind) for entry in entries for field, kind in FIELDS.items())
        and len({*names}) == len(names)
        and all(entry["base"] in ("replace", "frozen") for entry in entries)
        and all(entry["memory"] in (None, *names) for entry in entries)
        and all(name in tensors and alias not in tensors for alias, name in aliases.items())
    )


def _fill(model: nn.Module, tensors: dict[str, Tensor], aliases: dict[str, str], file: Any) -> None:
    tensors = tensors | {alias: tensors[name] for alias, name in aliases.items() if name in tensors}
    own = model.state_dict()
    if _distinct(own)[1] != aliases:
        raise ValueError(f"{file}: its model ties tensors otherwise than this one")
    problems = [f"{name} is missing in the file" for name in own.keys() - tensors.keys()]
    problems += [f"{name} is not in the model" for name in tensors.keys() - own.keys()]
    problems += [
        f"{name} is {tuple(tensors[name].shape)} in the file and {tuple(tensor.shape)} in the model"
        for name, tensor in own.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{file} does not fit the model: {'; '.join(sorted(problems)[:5])}{more}")
    model.load_state_dict(tensors)
