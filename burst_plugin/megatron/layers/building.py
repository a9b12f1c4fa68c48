"""Layers and models of Megatron as they are built: their core attention, and refusals."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, import_module
from megatron.core.transformer.transformer_layer import TransformerLayer

from burst_plugin.frameworks.wrapping import bind, wrap
from burst_plugin.megatron.batches.layouts import MEGATRONS_OWN
from burst_plugin.megatron.flags.arguments import (
    PACKS,
    RESETS,
    burst_is_possible,
    burst_is_requested,
    cuts_documents_as_one,
    flag_of,
    option_of,
    resets_attention_mask,
)
from burst_plugin.megatron.flags.config import asks_for_burst, is_hybrid, kinds_of, misspelt_kind, spreads_sequences
from burst_plugin.megatron.inference.checks import refuse_in_layer
from burst_plugin.megatron.layers.core_attention import BurstCoreAttention
from burst_plugin.megatron.layers.mla import hook_latents
from burst_plugin.megatron.memory.chunked_mlp import chunk_mlp
from burst_plugin.megatron.memory.host_memory_budget import check_host_memory_budget
from burst_plugin.megatron.recurrent.mixers import can_take_over
from burst_plugin.megatron.registry import Registry, group_of
from burst_plugin.megatron.sparse.building import hook_sparse_config, sparse_submodules
from burst_plugin.megatron.sparse.sparse_attention import BurstSparseAttention

_REPLACEABLE = ("DotProductAttention", "TEDotProductAttention")  # they compute what TransformerConfig says


def hook_building(registry: Registry) -> str:
    """Have layers choose their core attention when they are built, and refuse what a ring would compute wrongly.

    It wraps constructors of Megatron's layers and models: a layer with `cp_comm_type="burst"` gets the ring's core
    attention whatever its spec says, or raises ValueError. registry: the rings. Returns a line for the report of
    `install()`.
    """
    wrap(TransformerLayer, "__init__", partial(choose_core_attention, registry))
    wrap(MambaLayer, "__init__", partial(refuse_mamba, registry))
    wrap(DotProductAttention, "__init__", refuse_whole_sequences)
    hook_latents()
    hook_sparse_config()
    for model in _models_that_count_positions():
        wrap(model, "__init__", _refuse_counted_positions)
    wrap(GPTModel, "_preprocess", refuse_packed_mrope)
    wrap(GPTModel, "_preprocess", _refuse_cut_mrope)
    wrap(GPTModel, "_preprocess", partial(refuse_own_cuts, registry))
    return 'layers with cp_comm_type="burst" compute attention on the ring, whatever their spec says'


def choose_core_attention(
    registry: Registry,
    original: Callable[..., None],
    layer: Any,
    config: Any,
    submodules: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Build a `TransformerLayer`, with the core attention that its own cp_comm_type chooses."""
    _refuse_unlike_sizes(config, kwargs.get("pg_collection"))
    if spreads_sequences(config):
        misspelt = misspelt_kind(config.cp_comm_type)
        if misspelt is not None:
            asked, right = option_of("cp_comm_type", misspelt), option_of("cp_comm_type", "burst")
            raise ValueError(f"{asked} is not known: write {right}")
        if not asks_for_burst(config) and burst_is_possible():
            _warn_of_another_kind(config.cp_comm_type)
    refuse_other_attention(config, registry.layout)
    if asks_for_burst(config):
        submodules = copy.copy(submodules)
        refuse_local_rolls(config, registry.layout)
        refuse_other_mixers(config, registry.layout, submodules)
        for name, spec in vars(submodules).items():
            if name in ("self_attention", "cross_attention"):
                setattr(submodules, name, _with_choice(spec, registry))
            elif getattr(getattr(spec, "submodules", None), "core_attention", None) is not None:
                warnings.warn(
                    f"{name} of a layer is not on the ring, which is for self_attention and cross_attention: it "
                    "computes as its spec says",
                    stacklevel=2,
                )
    original(layer, config, submodules, *args, **kwargs)
    chunk_mlp(layer, registry.asked())
    if any(isinstance(module, BurstCoreAttention) for module in layer.modules()):
        layer.register_forward_pre_hook(refuse_in_layer, with_kwargs=True)
        if registry.asked().offload:
            layer.register_forward_pre_hook(partial(check_host_memory_budget, registry), with_kwargs=True)


def _refuse_unlike_sizes(config: Any, collection: Any) -> None:
    """Raise ValueError if a configuration that asks for the ring and Megatron's group have unlike sizes."""
    group = getattr(collection, "cp", None) or parallel_state.get_context_parallel_group(check_initialized=False)
    size = config.context_parallel_size
    if group is None or group.size() == size or is_hybrid(config) or "burst" not in kinds_of(config.cp_comm_type):
        return
    raise ValueError(
        f"TransformerConfig has {option_of('context_parallel_size', size)}, but the context-parallel group has "
        f"{group.size()} ranks: give initialize_model_parallel and TransformerConfig one size"
    )


def _with_choice(attention: Any, registry: Registry) -> Any:
    """Return an attention spec with its core attention to be chosen when built; anything else unchanged."""
    core = getattr(getattr(attention, "submodules", None), "core_attention", None)
    if core is None or getattr(core, "module", None) is ChosenCoreAttention:
        return attention
    attention = copy.copy(attention)
    attention.submodules = copy.copy(attention.submodules)
    attention.submodules.core_attention = ModuleSpec(
        module=ChosenCoreAttention, params={"original": core, "registry": registry}
    )
    return attention


class ChosenCoreAttention:
    """The constructor of a layer's core attention: the ring's if `cp_comm_type` is "burst", else the original.

    An instance is never made: calling the class returns a `BurstCoreAttention`, a `BurstSparseAttention`, or what the
    spec `original` builds. Multi-latent attention builds its core attention twice, first without a `cp_comm_type`;
    that first one is never used.
    """

    def __new__(cls, *args: Any, original: Any, registry: Registry, **kwargs: Any) -> Any:
        """Return the core attention of one layer."""
        config = kwargs["config"]
        kind = kwargs.get("cp_comm_type")
        if kind is None:
            listed = config.cp_comm_type
            kind = "burst" if isinstance(listed, list) and "burst" in listed else listed
        if spreads_sequences(config) and kind == "burst":
            if (submodules := sparse_submodules(original)) is not None:
                return BurstSparseAttention(*args, submodules=submodules, registry=registry, **kwargs)
            # Megatron does not tell layers their cp_comm_type with hybrid context parallelism.
            if kwargs.get("cp_comm_type") == "burst" or is_hybrid(config):
                check_replaceable(original, kwargs.get("layer_number"))
            return BurstCoreAttention(*args, registry=registry, **kwargs)
        return build_module(original, *args, **kwargs)


def check_replaceable(original: Any, layer_number: int | None) -> None:
    """Raise ValueError for a core attention other than Megatron's usual ones, which may compute something else."""
    kind: Any = original
    options: dict[str, Any] = {}
    if isinstance(original, ModuleSpec):
        kind, options = original.module, dict(original.params or {})
    while isinstance(kind, partial):
        kind, options = kind.func, {**kind.keywords, **options}
    kind = import_module(kind) if isinstance(kind, tuple) else kind
    module, name = kind.__module__, getattr(kind, "__name__", type(kind).__name__)
    usual = module.startswith("megatron.core.") and name in _REPLACEABLE
    if not usual and not getattr(kind, "burst_may_replace", False):
        raise ValueError(
            f"layer {layer_number} has a core attention of its own, {module}.{name}, in whose place burst attention "
            "would compute what TransformerConfig says; give this layer another cp_comm_type or, if that is the "
            f"same, set {name}.burst_may_replace = True"
        )
    if usual and any(value is not None for value in options.values()):
        raise ValueError(
            f"layer {layer_number} gives its core attention options in its spec, {', '.join(sorted(options))}, in "
            "whose place burst attention would take those of TransformerConfig: set them there"
        )


def _warn_of_another_kind(cp_comm_type: Any) -> None:
    """Warn of layers without the ring although it was asked for, by the flag or by installing it without flags."""
    if burst_is_requested() and cp_comm_type is not None:  # a script's own model has chosen another kind
        return
    reason = "burst_plugin is installed, but not asked for by"
    if burst_is_requested():
        reason = "--cp-comm-type burst did not reach"
    warnings.warn(
        f"{reason} a model's TransformerConfig, which has cp_comm_type={cp_comm_type!r}, so that Megatron's own "
        "context parallelism runs in its layers; set cp_comm_type='burst' there",
        stacklevel=2,
    )


def refuse_other_attention(config: Any, layout: str) -> None:
    """Raise ValueError for layers on Megatron's own context parallelism, which is always in zigzag."""
    if spreads_sequences(config) and layout != MEGATRONS_OWN and set(kinds_of(config.cp_comm_type)) != {"burst"}:
        raise ValueError(
            f"layout={layout!r} needs cp_comm_type='burst' in all layers, got {config.cp_comm_type!r}: Megatron's "
            "own context parallelism takes batches to be cut in zigzag; use --burst-layout zigzag"
        )


def refuse_local_rolls(config: Any, layout: str) -> None:
    """Raise ValueError for hidden states that Megatron rolls inside ranks whose tokens are not consecutive."""
    if getattr(config, "mtp_hsm", False) and config.sequence_parallel and layout != MEGATRONS_OWN:
        raise ValueError(
            f"mtp_hsm=True with sequence_parallel=True is not supported with layout={layout!r}: Megatron takes "
            "tokens of a rank for consecutive ones; use --burst-layout zigzag, or drop one of these flags"
        )


def refuse_other_mixers(config: Any, layout: str, submodules: Any) -> None:
    """Raise ValueError for layers that rely on which tokens a rank holds, where it holds others."""
    mixer = submodules.self_attention
    if getattr(getattr(mixer, "submodules", None), "core_attention", None) is None:
        _refuse_mixer(mixer, config, layout)


def refuse_mamba(
    registry: Registry,
    original: Callable[..., None],
    layer: Any,
    config: Any,
    submodules: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Build a `MambaLayer`, or raise ValueError where a rank holds other tokens than its mixer takes them for."""
    if asks_for_burst(config):
        _refuse_mixer(submodules.mixer, config, registry.layout)
    original(layer, config, submodules, *args, **kwargs)


def refuse_whole_sequences(original: Callable[..., None], core: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Build Megatron's own core attention, or raise ValueError where it would take shards for whole sequences."""
    if config.context_parallel_size > 1:
        size, kind = option_of("context_parallel_size", config.context_parallel_size), config.cp_comm_type
        kind = "cp_comm_type=None" if kind is None else option_of("cp_comm_type", kind)
        raise ValueError(
            f"{size} with {kind} is not possible in layers with Megatron's DotProductAttention, which has no context "
            f"parallelism: write {option_of('cp_comm_type', 'burst')}, or take Transformer Engine's attention"
        )
    original(core, config, *args, **kwargs)


def _refuse_mixer(mixer: Any, config: Any, layout: str) -> None:
    kind = getattr(mixer, "module", mixer)
    kind = import_module(kind) if isinstance(kind, tuple) else kind
    if kind in (IdentityOp, None):
        return
    if is_hybrid(config):
        option, tokens, instead = "hybrid_context_parallel", "consecutive ones", "context_parallel_size"
    elif can_take_over(kind):
        return
    elif layout != MEGATRONS_OWN:
        option, tokens, instead = f"layout={layout!r}", "those of zigzag", "--burst-layout zigzag"
    elif resets_attention_mask():
        option, tokens, instead = flag_of(RESETS), "those of one document", "packed_seq_params"
    elif cuts_documents_as_one():
        option, tokens = flag_of(PACKS), "those of documents that are each cut in zigzag"
        instead = "packed_seq_params of a forward_step of your own, cut by burst_plugin.megatron.packed_indices"
    else:
        return
    name = getattr(kind, "__name__", kind)
    raise ValueError(
        f"{name} layers are not supported with {option}: they take a rank's tokens for {tokens}; use {instead}"
    )


def _models_that_count_positions() -> tuple[type, ...]:
    with warnings.catch_warnings():  # about Apex, which is needed for BERT only
        warnings.simplefilter("ignore")
        from megatron.core.models.bert.bert_model import BertModel
        from megatron.core.models.T5.t5_model import T5Model
    return BertModel, T5Model


def _refuse_counted_positions(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Build a `BertModel` or `T5Model`, or raise ValueError where it would count positions from 0 on every shard."""
    call = bind(original, *args, **kwargs)
    call.apply_defaults()
    config, kind = call.arguments["config"], call.arguments["position_embedding_type"]
    if asks_for_burst(config):
        if kind in ("learned_absolute", "relative"):
            raise ValueError(
                f"{option_of('position_embedding_type', kind)} is not supported here with cp_comm_type='burst': this "
                "model counts positions of every rank's shard from 0; use rope"
            )
        if is_hybrid(config):
            raise ValueError(
                "hybrid_context_parallel is not supported here with cp_comm_type='burst': this model does not hand "
                "on packed_seq_params, and its ranks would attend to their own tokens only; use context_parallel_size"
            )
        for name in ("add_binary_head", "return_embeddings"):
            if call.arguments.get(name):
                raise ValueError(
                    f"{name}=True is not supported with cp_comm_type='burst': it would read every rank's shard as if "
                    "it were the sequence; use False"
                )
    original(*args, **kwargs)


def refuse_packed_mrope(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `GPTModel._preprocess`, or raise ValueError for packed sequences that Megatron would rotate as one."""
    packed = bind(original, model, *args, **kwargs).arguments.get("packed_seq_params")
    rotary = type(getattr(model, "rotary_pos_emb", None))
    is_packed = packed is not None and packed.qkv_format == "thd"
    if is_packed and rotary is MultimodalRotaryEmbedding and asks_for_burst(model.config):
        raise ValueError(
            "position_embedding_type='mrope' is not supported with packed sequences: Megatron cuts its positions as "
            "those of one sequence; use batches of whole sequences"
        )
    return original(model, *args, **kwargs)


def _refuse_cut_mrope(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `GPTModel._preprocess`, or raise ValueError for positions of mRoPE that Megatron would cut once more."""
    arguments = bind(original, model, *args, **kwargs).arguments
    held, ids = arguments.get("position_ids"), arguments.get("input_ids")
    is_multimodal = type(getattr(model, "rotary_pos_emb", None)) is MultimodalRotaryEmbedding
    if is_multimodal and held is not None and ids is not None and asks_for_burst(model.config):
        ranks = group_of(getattr(model, "pg_collection", None)).size()
        if held.dim() != 3 or held.shape[-1] != ids.shape[1] * ranks:
            raise ValueError(
                f"position_ids of mRoPE are {list(held.shape)}, expected those of whole sequences, "
                f"{[3, ids.shape[0], ids.shape[1] * ranks]}: Megatron makes rotary embedding of them, and cuts that; "
                "get_batch_on_this_cp_rank leaves them whole"
            )
    return original(model, *args, **kwargs)


def refuse_own_cuts(registry: Registry, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `GPTModel._preprocess`, or raise ValueError for a model with images that cuts embeddings by itself.

    Those of Megatron-Bridge do so in zigzag, and have a rotary embedding of their own, of positions [3, B, S].
    """
    arguments = bind(original, model, *args, **kwargs).arguments
    axes: Any = arguments.get("position_ids")
    rotary = type(getattr(model, "rotary_pos_emb", None))
    has_axes = axes is not None and axes.dim() == 3
    by_documents = arguments.get("packed_seq_params") is not None or resets_attention_mask()
    layout = registry.layout if by_documents else registry.layout_of_sequences
    cuts_itself = has_axes and rotary is not MultimodalRotaryEmbedding and asks_for_burst(model.config)
    if cuts_itself and layout != MEGATRONS_OWN:
        raise ValueError(
            f"layout={layout!r} is not supported with {rotary.__name__} of positions {list(axes.shape)}: models that "
            "bring it cut their embeddings in zigzag by themselves, and labels would follow the layout; use "
            "--burst-layout zigzag (layout='zigzag')"
        )
    return original(model, *args, **kwargs)
