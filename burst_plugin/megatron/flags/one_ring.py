"""`--hybrid-context-parallel` of Megatron's scripts, taken as one ring of all data- and context-parallel ranks.

Megatron cuts a global batch into its documents, and computes each on a group of ranks whose size follows from the
document's length, so that ranks have similar work. One ring with layout "auto" evens the work as well: it assigns the
documents of a microbatch to ranks, short ones whole. On 4 ranks that hold 1024 tokens each, 8 samples of 2048 tokens
are 4 microbatches of 2 samples, in which a rank has 1024 tokens as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core import utils

from burst_plugin.frameworks.wrapping import wrap_everywhere
from burst_plugin.megatron.flags.arguments import PACKS, flag_of, written_layout
from burst_plugin.megatron.flags.config import is_hybrid, kinds_of
from burst_plugin.strategy import AUTO, Strategy

_MERGES = "flatten_batch_for_packed_sequences"  # in releases that make one row of a microbatch of several samples
_LEVELS = "hierarchical_context_parallel_sizes"
_CHANGING = ("rampup_batch_size", "step_batch_size_schedule")  # make batches of several sizes
_SKIPPING = ("iterations_to_skip", "result_rejected_tracker_filename")  # the latter adds to the former
_EVALUATION = ("eval_micro_batch_size", "eval_global_batch_size")


def hook_validation(arguments: Any, layout: str | None = None) -> None:
    """Wrap Megatron's `validate_args`, so that it sees parsed `--hybrid-context-parallel` as one ring of all ranks.

    Args:
        arguments: the module `megatron.training.arguments`.
        layout: of the strategy that `install()` got, which flags do not change; None if it got none.
    """
    wrap_everywhere(arguments, "validate_args", partial(_validate, layout))


def _validate(layout: str | None, original: Callable[..., Any], args: Any, *others: Any, **options: Any) -> Any:
    """Run `validate_args`, after a hybrid flag has become one ring; rank 0 says so."""
    taken = take_as_one_ring(args, layout)
    if taken and args.rank == 0:
        print(f"burst_plugin: {taken}", flush=True)
    return original(args, *others, **options)


def take_as_one_ring(args: Any, layout: str | None = None) -> str | None:
    """Turn parsed `--hybrid-context-parallel` into one ring of all ranks, by changing `args`; return a message on it.

    None is returned, and nothing changes, where Megatron's script brings no packed documents, since a `forward_step`
    of the user's own may bring groups; where not all layers are burst attention; in a pipeline or without
    `--calculate-per-token-loss`, which Megatron refuses then; and where ranks cannot be one ring. A step trains on as
    many samples as before, in microbatches of another size.

    Args:
        args: what Megatron's parser returned.
        layout: of the strategy that `install()` got; None to let flags decide, and choose "auto" if they do not.
    """
    packs = next((name for name in ("sft", PACKS) if getattr(args, name, False)), None)
    if not (is_hybrid(args) and packs and set(kinds_of(args.cp_comm_type)) == {"burst"}):
        return None
    if args.pipeline_model_parallel_size > 1 or not args.calculate_per_token_loss:
        return None
    ranks = args.world_size // _weight_shards(args)
    if not _can_be_one_ring(args, ranks):
        return None
    before = dict(vars(args))
    _set_batch_sizes(args, ranks)
    if ranks != args.context_parallel_size:
        setattr(args, _LEVELS, None)
    args.context_parallel_size, args.hybrid_context_parallel = ranks, False
    if layout is None and written_layout(args) is None:
        args.burst_layout = AUTO
    return _said(args, before, packs, layout)


def _weight_shards(args: Any) -> int:
    """Return the ranks that share a weight: tensor-parallel ones, and from 0.19 on maybe some that gather it."""
    written = getattr(args, "tensor_parallel_num_weight_shards", None)
    return int(written or args.tensor_model_parallel_size * getattr(args, "gtp_weight_remat_size", 1))


def _can_be_one_ring(args: Any, ranks: int) -> bool:
    """Return whether all ranks can share sequences as Megatron demands; else Megatron says what does not fit."""
    divides = ranks * _weight_shards(args) == args.world_size and ranks % args.context_parallel_size == 0
    return bool(ranks > 1 and divides and args.seq_length and args.seq_length % (2 * ranks) == 0)


def _set_batch_sizes(args: Any, ranks: int) -> None:
    """Let steps and evaluations have as many samples on one ring as the parsed sizes give them on several.

    Samples to evaluate stay in microbatches of the size written for training, into which any number can be cut.
    """
    samples, written = args.micro_batch_size * ranks // args.context_parallel_size, args.micro_batch_size
    if getattr(args, "step_batch_size_schedule", None):
        if getattr(args, "eval_global_batch_size", 0) is None:
            args.eval_global_batch_size = samples
    elif args.global_batch_size is None:
        args.global_batch_size = samples
    args.micro_batch_size = _samples_at_a_time(args, ranks)
    if hasattr(args, "eval_micro_batch_size"):
        if not hasattr(utils, _MERGES):
            args.eval_micro_batch_size = 1
        elif args.eval_micro_batch_size is None:
            args.eval_micro_batch_size = written


def _samples_at_a_time(args: Any, ranks: int) -> int:
    """Return the number of samples in a microbatch, at most `--max-seqlen-per-dp-cp-rank` tokens on each rank.

    Megatron bounds what a rank holds by that flag alone, whatever --micro-batch-size is. The size stays as it is
    without the flag, if batch sizes change, and where Megatron takes no other size: with tensor parallelism ranks
    get microbatches of evaluation in buffers of the size for training, and skipped iterations read one row.
    Releases until 0.18 cannot merge packed samples: their microbatches are of one.
    """
    if not hasattr(utils, _MERGES):
        return 1
    stays = any(getattr(args, name, None) for name in (*_CHANGING, *_SKIPPING))
    room = getattr(args, "max_seqlen_per_dp_cp_rank", None)
    if stays or args.tensor_model_parallel_size > 1 or not room:
        return int(args.micro_batch_size)
    most, copies = ranks * room // args.seq_length, _weight_shards(args)  # each copy has microbatches of its own
    return max((size for size in range(1, most + 1) if args.global_batch_size % (size * copies) == 0), default=1)


def _said(args: Any, before: dict[str, Any], packs: str, layout: str | None) -> str:
    """Return the text that rank 0 prints: the flags of the ring that takes the place of groups per length."""
    names = ["context_parallel_size", "micro_batch_size", "global_batch_size"]
    names += [name for name in _EVALUATION if before.get(name) != getattr(args, name, None)]
    if layout is None:
        names.insert(1, "burst_layout")
    flags = " ".join(flag_of(name, getattr(args, name)) for name in names if getattr(args, name) is not None)
    said = (
        f"--hybrid-context-parallel is taken as {flags}: one ring of all {args.context_parallel_size} ranks, on "
        "which a step has as many samples"
    )
    layout = layout or written_layout(args)
    if layout == AUTO:
        said += ", and documents give ranks even work without a group for each length"
    if packs == "sft" and layout != Strategy.layout:
        said += ". Conversations are not padded"
    if before.get(_LEVELS) and not getattr(args, _LEVELS):
        said += f". {flag_of(_LEVELS, before[_LEVELS])} is left out: ranks ask each other for their node"
    return (
        f"{said}. For groups leave out {flag_of(packs)}, and bring them in packed_seq_params.cp_group from a "
        "forward_step of your own"
    )
