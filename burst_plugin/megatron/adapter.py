"""What `install()` changes in Megatron-core: it applies repairs and wraps functions, once."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from burst_plugin.activations.kept_attention import follow_checkpoint_class
from burst_plugin.context import ContextParallel
from burst_plugin.frameworks.refusal import exit_if_refused
from burst_plugin.frameworks.wrapping import announce, wrap
from burst_plugin.megatron.arguments import (
    add_arguments,
    burst_is_possible,
    burst_is_requested,
    mend_help,
    option_of,
)
from burst_plugin.megatron.choice import ChosenCoreAttention
from burst_plugin.megatron.chunked_loss import follow_losses
from burst_plugin.megatron.chunked_mlp import chunk_mlp
from burst_plugin.megatron.config import asks_for_burst, is_hybrid, misspelt_kind, spreads_sequences
from burst_plugin.megatron.core_attention import BurstCoreAttention
from burst_plugin.megatron.distillation import stamp_logits
from burst_plugin.megatron.documents import follow_documents
from burst_plugin.megatron.even_microbatches import add_flag, follow_flag
from burst_plugin.megatron.flag_checks import refuse_flags
from burst_plugin.megatron.host_room import expect_on_host
from burst_plugin.megatron.identity import follow_schedules
from burst_plugin.megatron.inference import follow_inference, mend_server
from burst_plugin.megatron.inference_checks import refuse_in_layer
from burst_plugin.megatron.layouts import MEGATRONS_OWN, follow_layout
from burst_plugin.megatron.loss_repairs import weigh_tokens_alike
from burst_plugin.megatron.registry import Registry
from burst_plugin.megatron.releases import about, parse_version
from burst_plugin.megatron.repairs import apply_repairs
from burst_plugin.megatron.router_losses import weigh_valid_tokens_alike
from burst_plugin.strategy import Strategy

__all__ = ["Adapter", "install_adapter"]

_MARK = "_burst_plugin_adapter"
_OTHER_MIXER = "{kind} layers are not supported with {option}: they take a rank's tokens for {tokens}; use {instead}"


class Adapter:
    """An installed adapter: its rings, and a report of what it did."""

    def __init__(self, strategy: Strategy | None) -> None:
        self.registry = Registry(strategy)
        self.report: list[str] = []

    def contexts(self) -> list[ContextParallel]:
        """Return the rings in use, one per context-parallel group."""
        return self.registry.contexts()

    def __str__(self) -> str:
        return "burst_plugin in Megatron-core:\n" + "\n".join(f"  - {line}" for line in self.report)


def install_adapter(strategy: Strategy | None) -> Adapter:
    """Install the adapter once, and return it; see `burst_plugin.megatron.install`."""
    if strategy is not None and strategy.head_chunk:
        raise ValueError(
            f"head_chunk={strategy.head_chunk} is for models of transformers; Megatron's layers project all heads at "
            "once: leave it out, or use a larger tensor-model-parallel size"
        )
    installed: Adapter | None = getattr(TransformerLayer.__init__, _MARK, None)
    if installed is not None:
        if strategy not in (None, installed.registry.strategy):
            raise ValueError(
                f"already installed with {installed.registry.strategy}, got {strategy}; call install() once"
            )
        return installed
    adapter = Adapter(strategy)
    version = parse_version(megatron_version)
    adapter.report.append(about(version))
    adapter.report.append(follow_layout(adapter.registry))  # before repairs, which wrap what it wraps
    adapter.report += apply_repairs(version)
    setattr(wrap(TransformerLayer, "__init__", partial(_choose_core_attention, adapter)), _MARK, adapter)
    adapter.report.append('layers with cp_comm_type="burst" compute attention on the ring, whatever their spec says')
    wrap(MambaLayer, "__init__", partial(_refuse_mamba, adapter))
    wrap(DotProductAttention, "__init__", _refuse_whole_sequences)
    for model in _models_that_count_positions():
        wrap(model, "__init__", _refuse_counted_positions)
    wrap(GPTModel, "_preprocess", _refuse_packed_mrope)
    follow_checkpoint_class(CheckpointFunction)
    wrap(parallel_state, "initialize_model_parallel", partial(_make_ring, adapter))
    wrap(parallel_state, "destroy_model_parallel", partial(_forget_rings, adapter))
    adapter.report.append("rings are made with Megatron's groups, and forgotten with them")
    adapter.report.append(follow_schedules(adapter.registry.rings, lambda: adapter.registry.identity))
    adapter.report.append(follow_documents(adapter.registry))
    adapter.report.append(weigh_tokens_alike(adapter.registry))
    adapter.report.append(weigh_valid_tokens_alike(adapter.registry))
    adapter.report.append(follow_losses(adapter.registry))
    adapter.report.append(follow_inference(adapter.registry))  # after what wraps a model's forward, too
    adapter.report.append(_extend_argument_parser())
    return adapter


def _extend_argument_parser() -> str:
    """Add flags to the argument parser of Megatron's scripts, if it is there; return a line that says so."""
    if importlib.util.find_spec("megatron.training") is None:  # as in megatron-core from PyPI until 0.16
        return "Megatron's argument parser is not here: options are those of install()"
    try:
        from megatron.training import arguments
    except ImportError as error:  # only scripts need these packages, and will say so themselves
        return f"Megatron's argument parser cannot be imported ({error}): options are those of install()"
    wrap(arguments, "add_megatron_arguments", _add_flags)
    return "Megatron's argument parser knows --burst-backward, --burst-kernel and others"


def _choose_core_attention(
    adapter: Adapter,
    original: Callable[..., None],
    layer: Any,
    config: Any,
    submodules: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Build a `TransformerLayer`, with the core attention that its own cp_comm_type chooses."""
    misspelt = misspelt_kind(config.cp_comm_type)
    if spreads_sequences(config) and misspelt is not None:
        asked, right = option_of("cp_comm_type", misspelt), option_of("cp_comm_type", "burst")
        raise ValueError(f"{asked} is not known: write {right}")
    if spreads_sequences(config) and not asks_for_burst(config) and burst_is_possible():
        _warn_of_another_kind(config.cp_comm_type)
    _refuse_other_attention(config, adapter.registry.layout)
    if asks_for_burst(config):
        submodules = copy.copy(submodules)
        _refuse_local_rolls(config, adapter.registry.layout)
        _refuse_other_mixers(config, adapter.registry.layout, submodules)
        for name, spec in vars(submodules).items():
            if name in ("self_attention", "cross_attention"):
                setattr(submodules, name, _with_choice(spec, adapter.registry))
            elif getattr(getattr(spec, "submodules", None), "core_attention", None) is not None:
                warnings.warn(
                    f"{name} of a layer is not on the ring, which is for self_attention and cross_attention: it "
                    "computes as its spec says",
                    stacklevel=2,
                )
    original(layer, config, submodules, *args, **kwargs)
    chunk_mlp(layer, adapter.registry.asked())
    if any(isinstance(module, BurstCoreAttention) for module in layer.modules()):
        layer.register_forward_pre_hook(refuse_in_layer, with_kwargs=True)
        if adapter.registry.asked().offload:
            layer.register_forward_pre_hook(partial(expect_on_host, adapter.registry), with_kwargs=True)


def _warn_of_another_kind(cp_comm_type: Any) -> None:
    """Warn of layers without the ring although it was asked for, by the flag or by installing it without flags."""
    if burst_is_requested() and cp_comm_type is not None:  # a script's own model has chosen another kind
        return
    asked = (
        "--cp-comm-type burst did not reach"
        if burst_is_requested()
        else "burst_plugin is installed, but not asked for by"
    )
    warnings.warn(
        f"{asked} a model's TransformerConfig, which has cp_comm_type={cp_comm_type!r}, so that Megatron's own "
        "context parallelism runs in its layers; set cp_comm_type='burst' there",
        stacklevel=2,
    )


def _refuse_other_attention(config: Any, layout: str) -> None:
    """Raise ValueError for models with layers that Megatron's own context parallelism computes, always in zigzag."""
    kinds = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
    if spreads_sequences(config) and layout != MEGATRONS_OWN and set(kinds) != {"burst"}:
        raise ValueError(
            f"layout={layout!r} needs cp_comm_type='burst' in all layers, got {config.cp_comm_type!r}: Megatron's "
            "own context parallelism takes batches to be cut in zigzag; use --burst-layout zigzag"
        )


def _refuse_local_rolls(config: Any, layout: str) -> None:
    """Raise ValueError for hidden states that Megatron rolls inside ranks whose tokens are not consecutive."""
    if getattr(config, "mtp_hsm", False) and config.sequence_parallel and layout != MEGATRONS_OWN:
        raise ValueError(
            f"mtp_hsm=True with sequence_parallel=True is not supported with layout={layout!r}: Megatron takes "
            "tokens of a rank for consecutive ones; use --burst-layout zigzag, or drop one of these flags"
        )


def _refuse_other_mixers(config: Any, layout: str, submodules: Any) -> None:
    """Raise ValueError for layers that rely on which tokens a rank holds, where it holds others."""
    mixer = submodules.self_attention
    kind = getattr(mixer, "module", mixer)
    core = getattr(getattr(mixer, "submodules", None), "core_attention", None)
    if core is None and kind not in (IdentityOp, None):
        _refuse_mixer(getattr(kind, "__name__", kind), config, layout)


def _refuse_mamba(
    adapter: Adapter, original: Callable[..., None], layer: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Build a `MambaLayer`, or raise ValueError where a rank holds other tokens than it takes them for."""
    if asks_for_burst(config):
        _refuse_mixer("MambaLayer", config, adapter.registry.layout)
    original(layer, config, *args, **kwargs)


def _refuse_whole_sequences(original: Callable[..., None], core: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Build Megatron's own core attention, or raise ValueError where it would take shards for whole sequences."""
    if config.context_parallel_size > 1:
        size, kind = (option_of(name, getattr(config, name)) for name in ("context_parallel_size", "cp_comm_type"))
        raise ValueError(
            f"{size} with {kind} is not possible in layers with Megatron's DotProductAttention, which has no context "
            f"parallelism: write {option_of('cp_comm_type', 'burst')}, or take Transformer Engine's attention"
        )
    original(core, config, *args, **kwargs)


def _refuse_mixer(kind: object, config: Any, layout: str) -> None:
    if is_hybrid(config):
        option, tokens, instead = "hybrid_context_parallel", "consecutive ones", "context_parallel_size"
    elif layout != MEGATRONS_OWN:
        option, tokens, instead = f"layout={layout!r}", "those of zigzag", "--burst-layout zigzag"
    else:
        return
    raise ValueError(_OTHER_MIXER.format(kind=kind, option=option, tokens=tokens, instead=instead))


def _models_that_count_positions() -> tuple[type, ...]:
    with warnings.catch_warnings():  # about Apex, which is needed for BERT only
        warnings.simplefilter("ignore")
        from megatron.core.models.bert.bert_model import BertModel
        from megatron.core.models.T5.t5_model import T5Model
    return BertModel, T5Model


def _refuse_counted_positions(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Build a `BertModel` or `T5Model`, or raise ValueError where it would count positions from 0 on every shard."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    kind = given["position_embedding_type"]
    if asks_for_burst(given["config"]):
        if kind in ("learned_absolute", "relative"):
            raise ValueError(
                f"{option_of('position_embedding_type', kind)} is not supported here with cp_comm_type='burst': this "
                "model counts positions of every rank's shard from 0; use rope"
            )
        if is_hybrid(given["config"]):
            raise ValueError(
                "hybrid_context_parallel is not supported here with cp_comm_type='burst': this model does not hand "
                "on packed_seq_params, and its ranks would attend to their own tokens only; use context_parallel_size"
            )
        for name in ("add_binary_head", "return_embeddings"):
            if given.get(name):
                raise ValueError(
                    f"{name}=True is not supported with cp_comm_type='burst': it would read every rank's shard as if "
                    "it were the sequence; use False"
                )
    original(*args, **kwargs)


def _refuse_packed_mrope(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what `GPTModel._preprocess` does; refuse packed sequences that Megatron would rotate as one sequence."""
    packed = inspect.signature(original).bind(model, *args, **kwargs).arguments.get("packed_seq_params")
    rotary = type(getattr(model, "rotary_pos_emb", None))
    is_packed = packed is not None and packed.qkv_format == "thd"
    if is_packed and rotary is MultimodalRotaryEmbedding and asks_for_burst(model.config):
        raise ValueError(
            "position_embedding_type='mrope' is not supported with packed sequences: Megatron cuts its positions as "
            "those of one sequence; use batches of whole sequences"
        )
    return original(model, *args, **kwargs)


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


def _make_ring(adapter: Adapter, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do what `initialize_model_parallel` does, then make the ring, if any, on every rank.

    Flags are checked before, since this is the first thing that all training scripts of Megatron do.
    """
    with exit_if_refused():
        refuse_flags()
        follow_flag()
    stamp_logits(adapter.registry)
    mend_server()
    result = original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    adapter.registry.clear()  # in case earlier groups were destroyed in another way
    group = parallel_state.get_context_parallel_group(check_initialized=False)
    if group is not None and group.size() > 1 and burst_is_possible():
        hierarchical = given.get("hierarchical_context_parallel_sizes")
        adapter.registry.add(
            group, parallel_state.get_hierarchical_context_parallel_groups() if hierarchical else None
        )
        announce(adapter.contexts()[-1], layout=adapter.registry.layout)
    return result


def _forget_rings(adapter: Adapter, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Forget the rings, then do what `destroy_model_parallel` does."""
    adapter.registry.clear()
    return original(*args, **kwargs)


def _add_flags(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do what `add_megatron_arguments` does, and add the flags of this package."""
    return add_flag(add_arguments(mend_help(original(*args, **kwargs))))
