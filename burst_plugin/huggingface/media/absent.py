"""Batches without images, where other rings have some: towers run on all ranks that share gradients, or on none.

ZeRO-3 and FSDP gather a tower's parameters when it runs, from all ranks that have a part of them, and DeepSpeed
reduces the gradients that there are. So a ring without an image encodes one of another ring's, and leaves the
features out. Where no ring has one, ZeRO-3 would step on a tower's gradients of an earlier step, so it encodes an
earlier image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from burst_plugin.batch import SequenceShard
from burst_plugin.huggingface.media.entries import entries_of
from burst_plugin.huggingface.media.families import MODALITIES, by_frame, by_row, modalities_of
from burst_plugin.huggingface.media.units import units_of
from burst_plugin.huggingface.walks import modules_in

_REPLICAS: WeakKeyDictionary[torch.nn.Module, Callable[[], dist.ProcessGroup | None]] = WeakKeyDictionary()
_STAND_INS: dict[str, WeakSet[torch.nn.Module]] = {m: WeakSet() for m in MODALITIES}  # see `stands_in`
_SAMPLES = "_burst_plugin_samples"  # of a model: a small image, video and clip, by the name of the method


def note_replicas(model: torch.nn.Module, group: Callable[[], dist.ProcessGroup | None]) -> None:
    """Note that a model's gradients are shared by the ranks of a group, so that its towers run equally often on them.

    group: a function that is called when a forward begins, and returns the process group of these ranks, or None as
        long as there is none.
    """
    for module in modules_in(model):
        if isinstance(module, PreTrainedModel):
            _REPLICAS[module] = group


def with_absent_media(model: PreTrainedModel, shard: SequenceShard, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward, with media of another ring for towers that run only there; collective.

    If another ring's batch has images, video or audio that this batch has none of, one such input is taken from
    there, so that the tower runs on every rank that shares its parameters or gradients. If no batch has any, a tower
    that ZeRO-3 trains runs on an earlier input: DeepSpeed would take its gradients of an earlier step again.
    `stands_in` is True for it in this forward.

    kwargs: the keyword arguments of the forward, which are returned as they are if nothing is missing.
    """
    encoders = [(modality, module) for module in modules_in(model) for modality in modalities_of(module)]
    towers = {f"get_{modality}_features": module for modality, module in encoders}
    for modality, module in encoders:
        _STAND_INS[modality].discard(module)
    asked = _REPLICAS.get(model)
    trains = torch.is_grad_enabled()  # without gradients ranks that hold replicas may be elsewhere
    group = partition_group(model, with_replicas=trains) if towers else None
    if trains and towers and asked is not None:
        group = asked()
    keeps_gradients = trains and bool(towers) and _keeps_gradients(model)
    is_of_ring = group is not None and set(_members(group)) <= set(_members(shard.cp.group))
    if group is None or (is_of_ring and not keeps_gradients):
        return kwargs
    names = sorted(towers)
    entries = {name: entries_of(towers[name], name.split("_")[1], kwargs) for name in names}
    known: dict[str, Any] = model.__dict__.setdefault(_SAMPLES, {})
    for name in names:
        if entries[name] and name not in known:
            modality = name.split("_")[1]
            rows = by_row(towers[name], modality)
            units = units_of(next(iter(entries[name])), entries[name], by_frame(towers[name]), rows)
            known[name] = units.take([units.smallest])
    device = next(x.device for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
    none = dist.get_world_size(group)
    # Of each method: the first rank that is to run it, and that knows what to run it on; whether any does not know.
    rank = dist.get_rank(group)
    found = [[rank if entries[n] else none, rank if n in known else none, -int(n not in known)] for n in names]
    least = torch.tensor(found, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    for name, (runs, knows, unknown) in zip(names, least.tolist(), strict=True):
        if runs == none and (knows == none or not keeps_gradients):
            continue
        if unknown:
            box = [_on_cpu(known.get(name))]
            dist.broadcast_object_list(box, group=group, group_src=knows)
            known.setdefault(name, box[0])
        if not entries[name]:
            kwargs = {**kwargs, **_on_device(known[name], device)}
            for modality, module in encoders:
                if name == f"get_{modality}_features":
                    _STAND_INS[modality].add(module)
    return kwargs


def _keeps_gradients(model: PreTrainedModel) -> bool:
    """Return whether ZeRO-3 trains parameters of towers, whose gradients it keeps until there are new ones."""
    if not any(hasattr(parameter, "ds_process_group") for parameter in model.parameters()):
        return False
    text = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    of_text = {parameter for part in text if part is not None for parameter in part.parameters()}
    others = (parameter for parameter in model.parameters() if parameter not in of_text)
    return any(parameter.requires_grad and hasattr(parameter, "ds_process_group") for parameter in others)


def stands_in(module: torch.nn.Module, modality: str) -> bool:
    """Return whether a module encodes another ring's media in this forward, since its own batch has none.

    modality: "image", "video" or "audio".
    """
    return module in _STAND_INS[modality]


def partition_group(model: torch.nn.Module, with_replicas: bool) -> dist.ProcessGroup | None:
    """Return the group of ranks that have a part of a model's parameters each (FSDP, ZeRO-3); None for whole ones.

    with_replicas: whether to return the group of all ranks where parts have replicas (HSDP), between which gradients
        are reduced.
    """
    for module in modules_in(model):
        group = getattr(module, "process_group", None)
        if type(module).__name__ == "FullyShardedDataParallel" and isinstance(group, dist.ProcessGroup):
            has_replicas = getattr(module, "_inter_node_pg", None) is not None
            return dist.group.WORLD if has_replicas and with_replicas else group
    for parameter in model.parameters():
        group = getattr(parameter, "ds_process_group", None)  # of DeepSpeed's ZeRO-3
        if group is not None:
            found: dist.ProcessGroup = group
            return found
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            cut = [dim for dim, each in enumerate(parameter.placements) if each.is_shard()]  # type: ignore[attr-defined]
            if cut and mesh.size() == dist.get_world_size() and (with_replicas or len(cut) == mesh.ndim):
                return dist.group.WORLD
            return mesh.get_group(cut[-1]) if cut else None
    return None


def _members(group: dist.ProcessGroup | None) -> Sequence[int]:
    """Return the global ranks of a group; for None this process's rank alone."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def _on_cpu(sample: Any) -> Any:
    return {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in (sample or {}).items()}


def _on_device(sample: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in sample.items()}
