"""Faults of Megatron's own code that break context parallelism, repaired at run time: one function for each fault.

`install()` applies a repair if this version of Megatron has the fault. `burst doctor` lists all repairs.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, utils
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import multi_latent_attention, multi_token_prediction
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from burst_plugin.frameworks.wrapping import bind, wrap
from burst_plugin.megatron.layers.core_attention import BurstCoreAttention
from burst_plugin.megatron.recurrent.mixers import allow_delta_nets
from burst_plugin.megatron.releases import Version
from burst_plugin.megatron.repairs.batches import (
    CUT_BATCH,
    cut_over_context_parallel_ranks,
    cut_packed_batches,
    cut_without_transformer_engine,
    roll_padded_documents,
    wants_absent_te,
)
from burst_plugin.megatron.repairs.losses import count_no_labels_as_one
from burst_plugin.megatron.repairs.router_losses import weigh_routers_per_token


@dataclass(frozen=True)
class Repair:
    """A fault of Megatron's code, and the function that repairs it at run time.

    name: as `burst doctor` prints it.
    fault: what goes wrong without the repair.
    fixed_in: the first version without the fault; None if all releases have it.
    apply: changes Megatron; called once per process.
    needed: returns whether the fault matters in this environment.
    """

    name: str
    fault: str
    fixed_in: Version | None
    apply: Callable[[], None]
    needed: Callable[[], bool] = lambda: True

    def status(self, version: Version) -> str:
        """Return "applied" if this version of Megatron needs the repair here, or else why it is not applied."""
        if self.fixed_in is not None and version >= self.fixed_in:
            return f"not needed since {'.'.join(map(str, self.fixed_in))}"
        return "applied" if self.needed() else "not needed here"


def apply_repairs(repairs: Iterable[Repair], version: Version) -> list[str]:
    """Apply the repairs that this version of Megatron needs, and return a line of text for each that was applied."""
    due = [repair for repair in repairs if repair.status(version) == "applied"]
    for repair in due:
        repair.apply()
    return [f"repaired {repair.name}: {repair.fault}" for repair in due]


# -------------------------------------------------------------------------------------------- cp_comm_type by layer


class _CountedFromOne(list[Any]):
    """A list indexed by layer number, from 1 on. Numbers past its end, of token prediction, get the last item."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(min(index, len(self)) - 1 if isinstance(index, int) else index)


def _count_layers_from_one() -> None:
    def build(original: Any, layer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        listed = config.cp_comm_type
        if isinstance(listed, list):
            config.cp_comm_type = _CountedFromOne(listed)
        try:
            original(layer, config, *args, **kwargs)
        finally:
            config.cp_comm_type = listed

    wrap(TransformerLayer, "__init__", build)


# ---------------------------------------------------------------------------------------------- hierarchical groups


def _forget_hierarchical_groups() -> None:
    def destroy(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = None
        return result

    wrap(parallel_state, "destroy_model_parallel", destroy)


# -------------------------------------------------------------------------------------------------- rotary embedding


def _cut_tables_for_every_length() -> None:
    """Make YaRN's tables anew for every length where they are cut over ranks, since they are read from row 0 on.

    Tables of packed documents, and of one rank, are not cut: a longer one begins with the one that is asked for.
    """

    def cached(original: Any, embedding: Any, seq_len: int, *args: Any, **kwargs: Any) -> Any:
        arguments = bind(original, embedding, seq_len, *args, **kwargs).arguments
        group = arguments.get("cp_group") or embedding.cp_group
        is_cut = group is not None and group.size() > 1 and not arguments.get("packed_seq", False)
        if is_cut and seq_len != embedding.max_seq_len_cached:
            embedding.max_seq_len_cached = -1  # so that they are made anew
        return original(embedding, seq_len, *args, **kwargs)

    wrap(YarnRotaryEmbedding, "get_cached_cos_sin", cached)


# ------------------------------------------------------------------------------------------- multi-latent attention


def _leave_values_as_they_are() -> None:
    """Keep values of packed documents as they are; from 0.18 on, Megatron pads them to the head dim of the keys.

    On the ring zeros would be sent, and kernels that take head dims 192 and 128 may not take 192 twice.
    """

    def prepare(original: Any, layer: Any, query: Tensor, value: Tensor | None, *args: Any) -> Any:
        if value is None or not isinstance(layer.core_attention, BurstCoreAttention):
            return original(layer, query, value, *args)
        dim = value.shape[-1]
        return value, False, dim, dim

    wrap(multi_latent_attention, _FILLS_UP, prepare)


_FILLS_UP = "_prepare_mla_core_attention_value"


# ----------------------------------------------------------------------------------------------- weights at the start


def _keep_random_states() -> None:
    """Restore random states after a script has warmed up functions with random tensors of S/CP rows.

    Scripts are looked up when they make groups. They cannot be imported before, since they hold references to some of
    the functions of megatron.core that `install()` replaces.
    """

    def warm_up(original: Any, *args: Any, **kwargs: Any) -> None:
        state = torch.get_rng_state()
        gpu_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        original(*args, **kwargs)
        torch.set_rng_state(state)
        if gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state)

    def initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
        scripts = sys.modules.get("megatron.training.initialize")
        if hasattr(scripts, _WARMS_UP):
            wrap(scripts, _WARMS_UP, warm_up)
        return original(*args, **kwargs)

    wrap(parallel_state, "initialize_model_parallel", initialize)


_WARMS_UP = "_warmup_jit_function"


# ----------------------------------------------------------------------------------------------- pipeline parallelism


def _send_forward_before_backward() -> None:
    """Exchange activations before gradients, one after the other, between two pipeline stages.

    With two stages the next one is also the previous one, and messages between two ranks are matched by their order.
    Megatron batches them with the gradient sent first, and the activation received first.
    """

    def exchange(
        original: Any,
        stage: P2PCommunicator,
        output_tensor: Tensor | None,
        input_tensor_grad: Tensor | None,
        **options: Any,
    ) -> Any:
        if stage.pp_group.size() > 2 or not stage.config.batch_p2p_comm:
            return original(stage, output_tensor, input_tensor_grad, **options)
        recv_prev, recv_next = options.pop("recv_prev"), options.pop("recv_next")
        activation = stage.send_forward_recv_forward(output_tensor, recv_prev=recv_prev, **options)
        return activation, stage.send_backward_recv_backward(input_tensor_grad, recv_next=recv_next, **options)

    wrap(P2PCommunicator, "send_forward_backward_recv_forward_backward", exchange)


REPAIRS = (
    Repair(
        name="layer_cp_comm_type",
        fault="a list in cp_comm_type is read one layer too far, and past its end",
        fixed_in=(0, 17, 0),
        apply=_count_layers_from_one,
    ),
    Repair(
        name="hierarchical_groups",
        fault="destroy_model_parallel() keeps the hierarchical context-parallel groups, so they cannot be made again",
        fixed_in=None,
        apply=_forget_hierarchical_groups,
    ),
    Repair(
        name="packed_batch",
        fault="packed batches are not cut over ranks: offsets come as [1, documents + 1], and none that are padded",
        fixed_in=(0, 18, 0),
        apply=cut_packed_batches,
    ),
    Repair(
        name="packed_batch_without_te",
        fault="packed batches are only cut over ranks by Transformer Engine, which is not installed",
        fixed_in=None,
        apply=cut_without_transformer_engine,
        needed=wants_absent_te,
    ),
    Repair(
        name="batch_without_group",
        fault="a batch is cut over all ranks of the world where get_batch_on_this_cp_rank is given no group",
        fixed_in=None,
        apply=cut_over_context_parallel_ranks,
        needed=lambda: any(hasattr(utils, name) for name in CUT_BATCH),
    ),
    Repair(
        name="packed_token_prediction",
        fault="multi-token prediction shifts packed documents as if none were padded",
        fixed_in=None,
        apply=roll_padded_documents,
        needed=lambda: hasattr(multi_token_prediction, "_roll_tensor_packed_seq"),
    ),
    Repair(
        name="token_prediction_without_labels",
        fault="multi-token prediction makes NaN gradients on ranks whose tokens have no label",
        fixed_in=(0, 17, 0),
        apply=count_no_labels_as_one,
    ),
    Repair(
        name="yarn_tables",
        fault="the fused rotary embedding (YaRN, MLA) reads tables that are cut for longer sequences than this one",
        fixed_in=None,
        apply=_cut_tables_for_every_length,
    ),
    Repair(
        name="packed_mla_values",
        fault="multi-latent attention on packed documents pads values to the keys' head dim, which would be sent",
        fixed_in=None,
        apply=_leave_values_as_they_are,
        needed=lambda: hasattr(multi_latent_attention, _FILLS_UP),
    ),
    Repair(
        name="weights_at_start",
        fault="scripts draw random numbers by context-parallel size before they make routers and learned positions",
        fixed_in=None,
        apply=_keep_random_states,
        needed=lambda: importlib.util.find_spec("megatron.training") is not None,
    ),
    Repair(
        name="two_interleaved_stages",
        fault="two interleaved pipeline stages take gradients for activations, unless p2p communication overlaps",
        fixed_in=None,
        apply=_send_forward_before_backward,
    ),
    Repair(
        name="delta_net_config",
        fault="gated delta nets want context_parallel_size=1, and from 0.18 on heads that tp * cp ranks can share",
        fixed_in=None,
        apply=allow_delta_nets,
    ),
    Repair(
        name="router_losses_per_token",
        fault="--calculate-per-token-loss divides losses of routers by the tensor- and context-parallel ranks",
        fixed_in=(0, 19, 0),
        apply=weigh_routers_per_token,
    ),
)
