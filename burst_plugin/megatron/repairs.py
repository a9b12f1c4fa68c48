"""What Megatron's own code breaks for context parallelism, repaired at run time: one function for each fault.

A repair is applied by `install()` if the version at hand is one that has the fault. `burst doctor` lists all.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, utils
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import gpt_model
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import multi_latent_attention, multi_token_prediction
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from burst_plugin.frameworks.wrapping import wrap
from burst_plugin.megatron.core_attention import BurstCoreAttention
from burst_plugin.megatron.packed import packed_indices
from burst_plugin.megatron.releases import Version

__all__ = ["REPAIRS", "Repair", "apply_repairs"]


@dataclass(frozen=True)
class Repair:
    """A fault of Megatron's and what removes it.

    name: in the words of `burst doctor`.
    fault: what goes wrong without it.
    fixed_in: the first version without the fault; None if no release is without.
    apply: changes Megatron; called once per process.
    needed: whether the fault matters in this environment.
    """

    name: str
    fault: str
    fixed_in: Version | None
    apply: Callable[[], None]
    needed: Callable[[], bool] = lambda: True

    def status(self, version: Version) -> str:
        """ "applied", or why it is not."""
        if self.fixed_in is not None and version >= self.fixed_in:
            return f"not needed since {'.'.join(map(str, self.fixed_in))}"
        return "applied" if self.needed() else "not needed here"


def apply_repairs(version: Version) -> list[str]:
    """Apply what this version needs, and return one line for each."""
    due = [repair for repair in REPAIRS if repair.status(version) == "applied"]
    for repair in due:
        repair.apply()
    return [f"repaired {repair.name}: {repair.fault}" for repair in due]


# -------------------------------------------------------------------------------------------- cp_comm_type by layer


class _CountedFromOne(list[Any]):
    """A list whose first item is number 1, as layers are counted; those past its end, token prediction's, have the
    last one."""

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


# ------------------------------------------------------------------------------------------------- packed sequences


_NOT_BY_TOKEN = frozenset({"attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"})
_BY_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")


def _take_rows(batch: dict[str, Any], names: Iterable[str], offsets: Tensor, ranks: int, rank: int) -> None:
    """Cut what a packed batch has under these names, a row per token: [1, tokens, ...]."""
    rows = packed_indices(offsets, ranks, rank)
    for name in names:
        if batch.get(name) is not None:
            batch[name] = batch[name].index_select(1, rows)


def _cut_packed_batches() -> None:
    """Until 0.17 `get_thd_batch_on_this_cp_rank` takes offsets as the loader gives them, and none that are padded.

    Of these batches Megatron cuts all but four entries, of later ones four.
    """

    def cut(
        batch: dict[str, Any],
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None,
        max_seqlen: Tensor,
        cp_size: int | None = None,
        cp_rank: int | None = None,
    ) -> tuple[dict[str, Any], PackedSeqParams]:
        lengths = cu_seqlens.flatten()
        offsets = lengths if cu_seqlens_padded is None else cu_seqlens_padded.flatten()
        longest = int(max_seqlen.max())
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            cu_seqlens_q_padded=offsets,
            cu_seqlens_kv_padded=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        ranks = parallel_state.get_context_parallel_world_size() if cp_size is None else cp_size
        rank = parallel_state.get_context_parallel_rank() if cp_rank is None else cp_rank
        if ranks > 1:
            _take_rows(batch, batch.keys() - _NOT_BY_TOKEN, offsets, ranks, rank)
        return batch, params

    utils.get_thd_batch_on_this_cp_rank = cut


_WANT_TE = ("get_sft_batch_on_this_cp_rank", "_get_batch_on_this_cp_rank_per_document_balancing")


def _wants_absent_te() -> bool:
    return getattr(utils, "tex", None) is None and any(hasattr(utils, name) for name in _WANT_TE)


def _cut_without_transformer_engine() -> None:
    """From 0.18 the offsets are right, but only Transformer Engine can cut by them."""

    def cut(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
        if cp_group.size() > 1:
            padded = batch.get("cu_seqlens_padded")
            offsets = batch["cu_seqlens"] if padded is None else padded
            _take_rows(batch, _BY_TOKEN, offsets, cp_group.size(), cp_group.rank())
        return batch

    for name in _WANT_TE:
        if hasattr(utils, name):
            setattr(utils, name, cut)


# What `get_batch_on_this_cp_rank` leaves the cutting to, in 0.18 and later.
_CUT_BATCH = (
    "get_pretrain_batch_on_this_cp_rank",
    "_get_batch_on_this_cp_rank_per_sequence_balancing",
    *_WANT_TE,
)


def _cut_over_context_parallel_ranks() -> None:
    """Without a group it is the context-parallel one, as until 0.17, if Megatron has made groups."""

    def cut(original: Any, batch: dict[str, Any], cp_group: Any = None, **kwargs: Any) -> dict[str, Any]:
        if cp_group is None:
            cp_group = parallel_state.get_context_parallel_group(check_initialized=False)
        shard: dict[str, Any] = original(batch, cp_group=cp_group, **kwargs)
        return shard

    for name in _CUT_BATCH:
        if hasattr(utils, name):
            wrap(utils, name, cut)


def _roll_padded_documents() -> None:
    """Multi-token prediction rolls documents where they would begin without padding, not where they do."""

    def roll(original: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
        packed = given.arguments["packed_seq_params"]
        if packed.cu_seqlens_q_padded is not None:
            given.arguments["packed_seq_params"] = packed = copy.copy(packed)
            packed.cu_seqlens_q = packed.cu_seqlens_q_padded
        return original(*given.args, **given.kwargs)

    wrap(multi_token_prediction, "_roll_tensor_packed_seq", roll)


def _count_no_labels_as_one() -> None:
    """What the loss of token prediction is divided by is the sum of a rank's rolled mask: with no label there, 0."""

    def roll(original: Any, *args: Any, **kwargs: Any) -> Any:
        rolled, total = original(*args, **kwargs)
        return rolled, torch.where(total == 0, torch.ones_like(total), total)

    wrap(gpt_model, "roll_tensor", roll)


# -------------------------------------------------------------------------------------------------- rotary embedding


def _cut_tables_for_every_length() -> None:
    """YaRN's tables for the fused kernel are cut over context-parallel ranks, and then read from the first row on.

    Those of packed documents, and of one rank, are not cut: a longer one begins with the one that is asked for.
    """

    def cached(original: Any, embedding: Any, seq_len: int, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(embedding, seq_len, *args, **kwargs).arguments
        group = given.get("cp_group") or embedding.cp_group
        is_cut = group is not None and group.size() > 1 and not given.get("packed_seq", False)
        if is_cut and seq_len != embedding.max_seq_len_cached:
            embedding.max_seq_len_cached = -1  # so that they are made anew
        return original(embedding, seq_len, *args, **kwargs)

    wrap(YarnRotaryEmbedding, "get_cached_cos_sin", cached)


# ------------------------------------------------------------------------------------------- multi-latent attention


def _leave_values_as_they_are() -> None:
    """From 0.18 values of packed documents are filled up to the head dim of the keys, for attention that asks for it.

    On the ring zeros would travel, and kernels that take 192 and 128 would not take 192 twice.
    """

    def prepare(original: Any, layer: Any, query: Tensor, value: Tensor | None, *args: Any) -> Any:
        if value is None or not isinstance(layer.core_attention, BurstCoreAttention):
            return original(layer, query, value, *args)
        dim = value.shape[-1]
        return value, False, dim, dim

    wrap(multi_latent_attention, _FILLS_UP, prepare)


_FILLS_UP = "_prepare_mla_core_attention_value"


# ------------------------------------------------------------------------------------------------------- checkpoints


def _count_steps_of_pytorchs_adam() -> None:
    """Without Apex and Transformer Engine the optimizer within is PyTorch's Adam, which counts steps per parameter.

    What is loaded is shaped after a new optimizer's state, which has no step yet. Then all parameters are given one
    tensor as their step, which each of them would advance; and what it holds is not what was saved.
    """

    def state_dict(make: Any, optimizer: Any) -> Any:
        state = optimizer.optimizer.state if optimizer.optimizer is not None else None
        if state is None or state:
            return make(optimizer)
        state["no step yet"] = {"step": torch.tensor(0.0)}
        try:
            return make(optimizer)
        finally:
            state.clear()

    def load_state_dict(load: Any, optimizer: Any, state_dict: Any) -> None:
        (step,) = {float(group["step"]) for group in state_dict["optimizer"]["param_groups"]}
        load(optimizer, state_dict)
        for state in optimizer.optimizer.state.values():
            state["step"] = torch.tensor(step)

    wrap(DistributedOptimizer, "state_dict", state_dict)
    wrap(DistributedOptimizer, "load_state_dict", load_state_dict)


def _load_without_gradients() -> None:
    """In float32 the optimizer's own parameters are views of the model's, which autograd guards."""
    DistributedOptimizer.load_state_dict = torch.no_grad()(DistributedOptimizer.load_state_dict)


# ----------------------------------------------------------------------------------------------- weights at the start


def _has_scripts() -> bool:
    return importlib.util.find_spec("megatron.training") is not None


def _keep_random_states() -> None:
    """Before a script builds its model, it warms up functions with random tensors, S/CP of rows.

    Scripts are found when they make groups, not imported before: they hold some of the functions of
    megatron.core that `install()` replaces.
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
    """With two stages the next one is the previous one, and messages between two ranks are told apart by their order.

    In one batch the gradient is sent first, and the activation received first. So here they go one after the other.
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


# ------------------------------------------------------------------------------------------------------ experts


def _lacks_gemm() -> bool:
    return not hasattr(moe_utils, "te_general_gemm")


def _say_that_there_is_no_gemm() -> None:
    moe_utils.te_general_gemm = None


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
        apply=_cut_packed_batches,
    ),
    Repair(
        name="packed_batch_without_te",
        fault="packed batches are only cut over ranks by Transformer Engine, which is not installed",
        fixed_in=None,
        apply=_cut_without_transformer_engine,
        needed=_wants_absent_te,
    ),
    Repair(
        name="batch_without_group",
        fault="a batch is cut over all ranks of the world where get_batch_on_this_cp_rank is given no group",
        fixed_in=None,
        apply=_cut_over_context_parallel_ranks,
        needed=lambda: any(hasattr(utils, name) for name in _CUT_BATCH),
    ),
    Repair(
        name="packed_token_prediction",
        fault="multi-token prediction shifts packed documents as if none were padded",
        fixed_in=None,
        apply=_roll_padded_documents,
        needed=lambda: hasattr(multi_token_prediction, "_roll_tensor_packed_seq"),
    ),
    Repair(
        name="token_prediction_without_labels",
        fault="multi-token prediction makes NaN gradients on ranks whose tokens have no label",
        fixed_in=(0, 17, 0),
        apply=_count_no_labels_as_one,
    ),
    Repair(
        name="yarn_tables",
        fault="the fused rotary embedding (YaRN, MLA) reads tables that are cut for longer sequences than this one",
        fixed_in=None,
        apply=_cut_tables_for_every_length,
    ),
    Repair(
        name="packed_mla_values",
        fault="multi-latent attention on packed documents fills up values to the keys' head dim, which travels",
        fixed_in=None,
        apply=_leave_values_as_they_are,
        needed=lambda: hasattr(multi_latent_attention, _FILLS_UP),
    ),
    Repair(
        name="resume_without_te",
        fault="without Transformer Engine or Apex, the distributed optimizer cannot load, and then miscounts steps",
        fixed_in=None,
        apply=_count_steps_of_pytorchs_adam,
        needed=lambda: not distrib_optimizer.HAVE_APEX_OR_TE,
    ),
    Repair(
        name="resume_in_float32",
        fault="the distributed optimizer cannot load a checkpoint of a model in float32",
        fixed_in=None,
        apply=_load_without_gradients,
    ),
    Repair(
        name="weights_at_start",
        fault="scripts draw random numbers by context-parallel size before they make routers and learned positions",
        fixed_in=None,
        apply=_keep_random_states,
        needed=_has_scripts,
    ),
    Repair(
        name="two_interleaved_stages",
        fault="two interleaved pipeline stages take gradients for activations, unless p2p communication overlaps",
        fixed_in=None,
        apply=_send_forward_before_backward,
    ),
    Repair(
        name="router_without_te",
        fault="without Transformer Engine, the router of experts looks up a function that is not imported",
        fixed_in=(0, 17, 0),
        apply=_say_that_there_is_no_gemm,
        needed=_lacks_gemm,
    ),
)
