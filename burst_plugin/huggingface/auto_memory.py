"""`memory="auto"` for models of transformers: options are chosen before a step, by the memory that is left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from burst_plugin.activations.deferred_logits import optimizer_steps
from burst_plugin.activations.kept_attention import attention_can_be_kept
from burst_plugin.activations.pages import available_bytes, ranks_here
from burst_plugin.batch import SequenceShard
from burst_plugin.comm.process_groups import group_device
from burst_plugin.context import ContextParallel
from burst_plugin.huggingface.chunked_loss import chunk_of_logits, is_sharded_by_fsdp, tokens_of
from burst_plugin.huggingface.chunked_modules import mlps_can_be_cut
from burst_plugin.huggingface.text_only import text_modules
from burst_plugin.planning.cluster import Cluster
from burst_plugin.strategy import AUTO
from burst_plugin.training.memory import GIB
from burst_plugin.training.memory_choice import (
    SHARES,
    NextStep,
    loss_chunk,
    mlp_chunk,
    share_of_unknown,
    share_that_fits,
)
from burst_plugin.training.model_shape import shape_of
from burst_plugin.training.setting import Code, Setting
from burst_plugin.training.step_time import step_seconds, tokens_per_second

_TO_CHANGE = 'to choose yourself: memory="off", or set loss_chunk, mlp_chunk, keep_attention, offload'


@dataclass(frozen=True)
class HeldStates:
    """Facts about where a training run keeps gradients and the optimizer's states.

    zero: the stage of DeepSpeed's ZeRO, 0 to 3; 0 without it.
    on_host: whether the optimizer's states are in host memory.
    are_there: whether the optimizer has allocated its states before the first step, which then takes no more memory
        for them.
    are_wide: whether all of them are in float32; otherwise they are in the types of the weights.
    """

    zero: int = 0
    on_host: bool = False
    are_there: bool = False
    are_wide: bool = False


@dataclass
class _Counted:
    """What the latest choice for a model on a ring counted, and what the model's forwards then did.

    tokens: the tokens of a rank that were counted; 0 before the first choice.
    whole_logits: whether logits of all tokens at once were counted.
    makes_whole_logits: whether a forward of this rank has had logits of more tokens at once than a chunk has.
    forwards: the number of forwards in training, alike on all ranks of a ring.
    """

    tokens: int = 0
    whole_logits: bool = False
    makes_whole_logits: bool = False
    forwards: int = 0


_STATES: WeakKeyDictionary[ContextParallel, HeldStates] = WeakKeyDictionary()
_COUNTED: WeakKeyDictionary[ContextParallel, WeakKeyDictionary[Any, _Counted]] = WeakKeyDictionary()  # by model


def note_states(cp: ContextParallel, states: HeldStates) -> None:
    """Remember where gradients and optimizer states of the model on ring `cp` are kept; `choose_kept` needs it."""
    _STATES[cp] = states


def choose_chunks(cp: ContextParallel, model: Any, *, is_first: bool = True) -> None:
    """Choose `loss_chunk` and `mlp_chunk` of a ring's strategy for the size of its model, if `memory="auto"`.

    Options that are set already stay as they are. `mlp_chunk` is chosen only with gradient checkpointing, for models
    whose MLPs can be cut.

    model: the model that is to be trained, perhaps wrapped.
    is_first: whether DeepSpeed has yet to take the model. Later, `mlp_chunk` of a model that ZeRO-3 has partitioned
        is left as it is, since ZeRO-3 must know in advance that it has to gather a chunked MLP as a whole.
    """
    strategy = cp.strategy
    model = next((module for module in model.modules() if hasattr(module, "gradient_checkpointing_enable")), None)
    if strategy.memory != AUTO or model is None:
        return
    config, device = model.config.get_text_config(), next(model.parameters()).device
    gpu_bytes = _gpu_bytes(device)
    vocabulary, hidden = getattr(config, "vocab_size", None), getattr(config, "hidden_size", None)
    if not strategy.loss_chunk and isinstance(vocabulary, int):
        cp.choose(loss_chunk=loss_chunk(vocabulary, gpu_bytes))
    can_cut = is_first or not any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    can_cut = can_cut and recomputes(model) and not _compiled(model) and mlps_can_be_cut(model)
    if not strategy.mlp_chunk and isinstance(hidden, int) and can_cut:
        cp.choose(mlp_chunk=mlp_chunk(hidden, gpu_bytes))


def choose_kept(model: Any, shard: SequenceShard, batch: Mapping[str, Any]) -> None:
    """Choose `keep_attention` of a ring's strategy before a step on a sharded batch; collective.

    It is the share of attention's outputs that gradient checkpoints keep. Does nothing unless `memory="auto"`, and
    the model trains. Chooses for a batch with more tokens than any before it, and once more if a rank turns out to
    make whole logits that were to come in chunks. Chooses sizes of chunks as well, and prints on rank 0 what was
    chosen.

    model: the model of transformers. batch: the keyword arguments of its forward, tensors of this rank's tokens.
    """
    cp = shard.cp
    if cp.strategy.memory != AUTO or not model.training or not torch.is_grad_enabled():
        return
    before, was_chosen = cp.strategy, "keep_attention" in cp.chosen
    tokens, of_ring = tokens_of(shard, batch), _COUNTED.setdefault(cp, WeakKeyDictionary())
    counted = of_ring.setdefault(model, _Counted())
    is_first, is_longer = not counted.tokens, tokens > counted.tokens
    if is_longer:
        choose_chunks(cp, model, is_first=False)
    chunk = chunk_of_logits(model, shard, batch)
    counted.forwards += 1
    counted.makes_whole_logits |= not chunk and tokens > cp.strategy.loss_chunk
    is_open = (was_chosen or not (before.kept_share or before.offload)) and recomputes(model)
    is_open = is_open and attention_can_be_kept()
    if not is_longer and not _has_news(cp, counted, is_open):
        return
    if is_longer or is_open:  # on all ranks alike: news are a rank's own unless the choice is open
        counted.tokens = tokens
    counted.whole_logits = counted.makes_whole_logits
    chunk = 0 if counted.whole_logits else chunk
    step = next_step(model, shard, tokens, chunk)
    if is_open:
        place = SHARES.index(_share(model, step, tokens))
        if was_chosen:  # for shorter batches, or another model
            place = max(place, SHARES.index(before.keep_attention))
        cp.choose(keep_attention=SHARES[_most(cp, place)])
    if is_first or not is_longer or cp.strategy != before:
        _say(cp, model, step, tokens, chunk)


def _has_news(cp: ContextParallel, counted: _Counted, is_open: bool) -> bool:
    """Return whether a rank makes whole logits that were not counted; collective if the choice `is_open`.

    A program may read logits on one rank alone, which must not choose alone. So all ranks compare, at forwards 2, 4,
    8 and so on, which they count alike.
    """
    is_new = counted.makes_whole_logits and not counted.whole_logits
    if not is_open:
        return is_new
    return counted.forwards.bit_count() == 1 and bool(_most(cp, is_new))


def recomputes(model: Any) -> bool:
    """Return whether gradient checkpointing is on in a model of transformers, of any release."""
    state = getattr(model, "is_activation_checkpointing", None)
    return bool(model.is_gradient_checkpointing if state is None else state)


def _skips_layers(model: Any) -> bool:
    """Return whether checkpoints leave layers out, as every_n_layers does; a plan then counts no checkpoints."""
    layers = [each for each in text_modules(model) if isinstance(each, GradientCheckpointingLayer)]
    return len({layer.gradient_checkpointing for layer in layers}) > 1


def _share(model: Any, step: NextStep | None, tokens: int) -> str | float:
    if step is not None:
        return share_that_fits(step)
    config = model.config.get_text_config()
    layers, hidden = (getattr(config, name, 0) for name in ("num_hidden_layers", "hidden_size"))
    return share_of_unknown(tokens * layers * hidden * model.dtype.itemsize, _free_bytes(model.device))


def _most(cp: ContextParallel, number: int) -> int:
    """Return the largest of all ranks' numbers, 0 or more, since the fullest rank decides; collective."""
    if cp.group is None:
        return number
    cp.meet("the choice of what attention keeps")
    most = torch.tensor([int(number)], device=group_device(cp.group))
    with cp.rank_state.alone():
        dist.all_reduce(most, dist.ReduceOp.MAX, group=cp.group)
    return int(most)


def next_step(model: Any, shard: SequenceShard, tokens: int, chunk: int) -> NextStep | None:
    """Return the step that is about to be trained; None for a model that the planner does not know.

    tokens: of this rank, in all rows. chunk: how many of them have logits at a time; 0 for all.
    """
    rows = max(1, tokens * shard.cp.ranks // shard.tokens.length)
    cp, states = shard.cp, _STATES.get(shard.cp, HeldStates())
    try:
        shape = shape_of(model.config.to_dict(), type(model).__name__)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    world = dist.get_world_size() if dist.is_initialized() else 1
    setting = Setting(
        tokens=shard.tokens.length,
        code=Code.of_modules(fused_norms=False),
        context=cp.ranks,
        inner=cp.topology.ranks_per_node,
        data=max(1, world // cp.ranks),
        batch=max(1, world // cp.ranks) * rows,
        micro_batch=rows,
        zero=3 if states.zero == 3 or is_sharded_by_fsdp(model) else 1,
        recompute="full" if recomputes(model) and not _skips_layers(model) else "none",
        loss_chunk=chunk,
        mlp_chunk=cp.strategy.mlp_chunk if mlps_can_be_cut(model) else 0,
        offload_optimizer=states.on_host,
    )
    total, free = _gpu_bytes(model.device), _free_bytes(model.device)
    cluster = Cluster(gpu_gib=total / GIB) if total else Cluster(margin_gib=0.0)
    step = NextStep(
        model=shape,
        setting=setting,
        cluster=cluster,
        free=free,
        states=missing_states(model, states),
        item_bytes=_counted_type(model).itemsize,
    )
    try:
        step.needed()
    except (ValueError, ArithmeticError, LookupError):  # an odd shape, of which no plan is made
        return None
    return step


def _counted_type(model: Any) -> torch.dtype:
    """Return the type in which activations are counted: the model's, also under autocast, or a type of 16 bits.

    Under autocast products are in 16 bits, but what layers add up is not. Products of 8-bit weights have 16 bits.
    FSDP2 casts weights of its units to the type of its policy, which nothing public tells.
    """
    units = (module for module in model.modules() if isinstance(module, FSDPModule))
    policies = (getattr(unit._get_fsdp_state(), "_mp_policy", None) for unit in units)
    types = (getattr(policy, "param_dtype", None) for policy in policies)
    dtype: torch.dtype = next((kind for kind in types if kind is not None), model.dtype)
    return dtype if dtype.itemsize >= torch.bfloat16.itemsize else torch.bfloat16


def missing_states(model: Any, states: HeldStates) -> float:
    """Return the bytes of gradients, and of Adam's two moments, that this rank will have and has not yet."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    nbytes, gathered_share, steps = 0.0, _share_of_gathered(model), optimizer_steps()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, DTensor):
            count: float = parameter.to_local().numel()
        else:
            count = getattr(parameter, "ds_numel", parameter.numel()) * (
                1 / world if states.zero >= 2 else gathered_share
            )
        size = 4 if states.are_wide else max(2, parameter.element_size())
        nbytes += size * count if parameter.grad is None else 0
        # Gradients say nothing about moments: they come before the first step, and may be gone after it.
        if not states.are_there and not states.on_host and not steps.have_state_of(parameter):
            nbytes += 2 * size * count
    return nbytes


def _share_of_gathered(model: Any) -> float:
    """Return this rank's share of parameters that are whole now: 1, or its share of the others if FSDP gathered them.

    FSDP gathers the weights of the outermost unit before hooks of its forward, and nothing public has their shares.
    """
    cut = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if not cut or not isinstance(model, FSDPModule):
        return 1.0
    return sum(parameter.to_local().numel() for parameter in cut) / sum(parameter.numel() for parameter in cut)


def _gpu_bytes(device: torch.device) -> float | None:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _free_bytes(device: torch.device) -> float:
    """Return the bytes of a device that this rank may still take."""
    if device.type != "cuda":
        return (available_bytes() or 0) / ranks_here()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _compiled(model: Any) -> bool:
    """Return whether the model is compiled: an MLP in chunks would break its graph once more per layer."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def _say(cp: ContextParallel, model: Any, step: NextStep | None, tokens: int, chunk: int) -> None:
    """Print on rank 0 which options are on, why, and how to change them."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("burst_plugin: memory " + "\n  ".join(_lines(cp, model, step, tokens, chunk)), flush=True)


def _lines(cp: ContextParallel, model: Any, step: NextStep | None, tokens: int, chunk: int) -> Iterator[str]:
    yield f'"auto", {tokens:,} tokens on a rank:'
    chosen = list(_chosen(cp, model, step, tokens, chunk))
    yield from chosen or ["none of the options takes effect at this length"]
    if step is not None:
        needs = step.needed(cp.strategy.keep_attention)
        needed = f"{needs / GIB:.2f} GiB of {step.free / GIB:.2f} GiB that are free"
        if not recomputes(model) and step.needed() > step.free:
            again = replace(step, setting=replace(step.setting, recompute="full"))
            yield f"a step needs about {needed}: with gradient checkpointing {again.needed() / GIB:.2f} GiB"
        else:
            yield f"a step needs about {needed}, counted in {str(_counted_type(model)).removeprefix('torch.')}"
        if step.free and model.device.type == "cuda":
            seconds = sum(step_seconds(step.model, step.setting, step.cluster).values())
            yield f"about {tokens_per_second(step.setting, seconds):,.0f} tokens/s per GPU at an H100's rates"
    yield _TO_CHANGE


def _chosen(cp: ContextParallel, model: Any, step: NextStep | None, tokens: int, chunk: int) -> Iterator[str]:
    """Yield a line for each option that is on and matters for this many tokens."""
    strategy, config = cp.strategy, model.config.get_text_config()
    if chunk and tokens > chunk and model.get_output_embeddings() is not None:
        vocabulary = getattr(config, "vocab_size", 0)
        logits = f"{tokens * vocabulary * model.dtype.itemsize / GIB:.2f} GiB in one piece"
        yield f"loss in chunks of {chunk:,} tokens: its logits would take {logits}"
    if strategy.mlp_chunk and tokens > strategy.mlp_chunk and mlps_can_be_cut(model):
        why = ", since layers are computed again" if "mlp_chunk" in cp.chosen else ""
        yield f"MLPs in chunks of {strategy.mlp_chunk:,} tokens{why}"
    if recomputes(model):
        if strategy.kept_share:
            yield f"attention is not computed again: keep_attention={strategy.keep_attention!r}"
        else:
            yield f"attention is computed again: {_why_again(cp, step)}"


def _why_again(cp: ContextParallel, step: NextStep | None) -> str:
    """Return why attention is not kept under checkpoints."""
    if "keep_attention" not in cp.chosen:
        if cp.strategy.offload:
            return "with offload=True, keep_attention is yours to set"
        return "checkpoints of this release of PyTorch cannot keep it"
    if step is None:
        return "it would take more than a tenth of the free memory, and no plan is made for this model"
    return "there is no room to keep it on the fullest rank"
