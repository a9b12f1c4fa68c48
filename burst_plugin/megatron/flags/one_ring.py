"""`--hybrid-context-parallel` of Megatron's scripts, taken as one ring of all data- and context-parallel ranks.

Megatron cuts a global batch into its documents, and computes each on a group of ranks whose size follows from the
document's length, so that ranks have similar work. One ring with layout "auto" evens the work as well: it assigns the
documents of a microbatch to ranks, short ones whole. On 4 ranks that hold 1024 tokens each, 8 samples of 2048 tokens
are 4 microbatches of 2 samples, in which a rank has 1024 tokens as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import utils

from burst_plugin.frameworks.wrapping import wrap_everywhere
from burst_plugin.megatron.flags.arguments import PACKS, flag_of, written_layout
from burst_plugin.megatron.flags.config import is_hybrid, kinds_of
from burst_plugin.strategy import AUTO


def hook_validation(arguments: Any) -> None:
    """Change parsed flags before `validate_args` of `megatron.training.arguments` looks at them."""
    wrap_everywhere(arguments, "validate_args", _validate)


def _validate(original: Callable[..., Any], args: Any, *others: Any, **options: Any) -> Any:
    """Run `validate_args`, after a hybrid flag has become one ring; rank 0 says so."""
    taken = take_as_one_ring(args)
    if taken and args.rank == 0:
        print(f"burst_plugin: {taken}", flush=True)
    return original(args, *others, **options)


def take_as_one_ring(args: Any) -> str | None:
    """Turn parsed `--hybrid-context-parallel` into one ring of all ranks; return what to say of it, or None.

    It is left alone where Megatron's script brings no packed documents, since a `forward_step` of the user's own may
    bring groups; where not all layers are burst attention; and in a pipeline or without `--calculate-per-token-loss`,
    which Megatron refuses then. A step trains on as many samples as before, in microbatches of another size.
    """
    packs = next((name for name in ("sft", PACKS) if getattr(args, name, False)), None)
    if not (is_hybrid(args) and packs and set(kinds_of(args.cp_comm_type)) == {"burst"}):
        return None
    if args.pipeline_model_parallel_size > 1 or not args.calculate_per_token_loss:
        return None
    ranks = args.world_size // args.tensor_model_parallel_size
    if args.global_batch_size is None and not getattr(args, "step_batch_size_schedule", None):
        args.global_batch_size = args.micro_batch_size * ranks // args.context_parallel_size
    if getattr(args, "eval_micro_batch_size", 0) is None:
        args.eval_micro_batch_size = args.micro_batch_size
    args.micro_batch_size = _samples_at_a_time(args, ranks)
    args.context_parallel_size, args.hybrid_context_parallel = ranks, False
    if written_layout(args) is None:
        args.burst_layout = AUTO
    names = ("context_parallel_size", "burst_layout", "micro_batch_size", "global_batch_size")
    flags = " ".join(flag_of(name, getattr(args, name)) for name in names if getattr(args, name) is not None)
    return (
        f"--hybrid-context-parallel is taken as {flags}: one ring of all {ranks} ranks evens the work of documents "
        "without a group for each length, and a step trains on the same samples. For groups leave out "
        f"{flag_of(packs)}, and bring them in packed_seq_params.cp_group from a forward_step of your own"
    )


def _samples_at_a_time(args: Any, ranks: int) -> int:
    """Return the largest microbatch of which a rank holds at most `--max-seqlen-per-dp-cp-rank` tokens.

    Megatron bounds what a rank holds by that flag alone, whatever --micro-batch-size is. The size is left as it was
    if batch sizes change, without the flag, and in releases until 0.18, whose microbatches are of one packed sample.
    """
    changes = any(getattr(args, name, None) for name in ("rampup_batch_size", "step_batch_size_schedule"))
    room = getattr(args, "max_seqlen_per_dp_cp_rank", None)
    if changes or not room or not args.seq_length or not hasattr(utils, "flatten_batch_for_packed_sequences"):
        return int(args.micro_batch_size)
    most = ranks * room // args.seq_length
    return max((size for size in range(1, most + 1) if args.global_batch_size % size == 0), default=1)
