"""Distributed attention, forward and backward: time, rate, share of the kernel's rate, exposed communication, memory.

Where it runs (`--on`):

- `processes`: `--ranks` processes of this machine on its CPU, over gloo;
- `torchrun`: the processes that torchrun started, one per GPU where there are any:
  `torchrun --nproc-per-node 8 -m benchmarks attention ...`;
- `virtual`: all ranks in turn in this process, on its GPU if it has one, with a copy in memory for every message, on
  GPUs on side streams: merging, tile cutting, launch gaps and overlap without a cluster.

`kernel_share` is the time of the one-rank kernel on the whole sequence, divided by the number of ranks, over the
time of the ring; 1 is a ring that costs nothing. The kernel is timed under the same load, as many copies at once as
there are ranks, so that the clock and the memory's bandwidth are the same; `kernel_alone_s` is one copy while the
other ranks wait. In a virtual ring ranks take turns, so nothing is divided.
`exposed_s` is the time with transfers minus that of the same visits without. Everything is measured by turns in the
same rounds; times are medians over rounds of the slowest rank, and shares are medians of the rounds' shares. Last it
says what that is for the claims of this project.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention_claims import verdicts
from benchmarks.attention_ranks import Measured, group_rank, virtual_rank
from benchmarks.attention_rows import Found, is_of, line
from benchmarks.campaign import Campaign, Row, add_campaign_arguments
from benchmarks.contenders import CONTENDERS, Case, Contender
from benchmarks.contenders.burst import Burst
from benchmarks.limits import RefusedError, check_ranks
from benchmarks.results import under_torchrun
from burst_plugin.sequence.layout import even_length
from tests.support.ranks import run_ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PROCESS_BYTES = 400 * 10**6  # of a rank that has computed nothing yet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--seq", type=int, nargs="+", default=[8192], help="tokens of the whole sequence")
    parser.add_argument("--heads", type=int, default=8, help="query heads")
    parser.add_argument("--kv-heads", type=int, help="key and value heads; as many as query heads if not given")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", nargs="+", default=["float32"], help=", ".join(DTYPES))
    parser.add_argument("--mask", choices=("causal", "full"), default="causal")
    parser.add_argument("--on", choices=("processes", "torchrun", "virtual"), help="where the ranks are")
    parser.add_argument("--ranks", type=int, default=2, help="ranks; under torchrun as many as it started")
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        help="ranks that are taken for one node; by default all, under torchrun those that it started on a node",
    )
    parser.add_argument("--contenders", nargs="+", default=["burst"], help="names, or all")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each, by turns")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="for one case, all rounds, of `processes`")
    add_campaign_arguments(parser)
    parser.set_defaults(on="torchrun" if under_torchrun() else "processes")


def run(options: argparse.Namespace) -> int:
    """Measure, print and save."""
    if options.on == "torchrun" and "WORLD_SIZE" not in os.environ:
        raise RefusedError("--on torchrun: there are no ranks; start it with torchrun -m benchmarks attention ...")
    chosen, cases = _contenders(options.contenders), _cases(options)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # messages start before the kernels that hide them
    if options.on == "torchrun" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    _check_memory(cases, options.on)
    leads = True
    if options.on == "torchrun":
        if options.resume or options.patience:
            raise RefusedError(
                "--resume and --patience are not for torchrun, whose ranks would each decide for itself"
            )
        leads = _join_torchrun() == 0
    options.no_save |= not leads
    variant = "attention" if options.on == "processes" else f"attention-{options.on}"
    on_gpu = options.on != "processes" and torch.cuda.is_available()
    campaign = Campaign.begin(
        "attention", options, variant=variant, on_gpu=on_gpu, free=("seq", "dtype", "timeout_s")
    )
    for case in cases:
        campaign.measure(
            partial(is_of, case), partial(_measure, case, chosen, options), show if leads else lambda _: None
        )
    if leads:
        print(*verdicts(campaign.rows), sep="\n")
    campaign.end()
    return int(any(row.get("wrong", False) for row in campaign.rows))


def show(rows: Sequence[Row]) -> None:
    """Print them."""
    for row in rows:
        print(line(row), flush=True)


def bytes_per_rank(case: Case, virtual: bool = False) -> int:
    """About what one rank needs: the whole sequence for the one-rank kernel, and what a backward pass has at once.

    That is q, k, v, dout as they are and as the kernel reads them, its output, and its gradients, the latter three in
    float32 where the kernel works in it; the ring's blocks are parts of that. In a virtual ring all ranks' parts are
    in one process: as much once more.
    """
    heads = 2 * case.q_heads + 2 * case.kv_heads
    element = case.batch * case.ranks * case.seq * case.head_dim
    given = element * heads * case.dtype.itemsize
    worked_on = element * (2 * heads + case.q_heads) * max(4, case.dtype.itemsize)
    return _PROCESS_BYTES + (given + worked_on) * (2 if virtual else 1)


def _contenders(names: Sequence[str]) -> list[Contender]:
    known = {contender.name: contender for contender in CONTENDERS}
    if "all" in names:
        return list(known.values())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise RefusedError(f"--contenders {', '.join(unknown)}: unknown; there are: {', '.join(known)}; or all")
    return [known[name] for name in names]


def _cases(options: argparse.Namespace) -> list[Case]:
    unknown = [name for name in options.dtype if name not in DTYPES]
    if unknown:
        raise RefusedError(f"--dtype {', '.join(unknown)}: unknown; there are: {', '.join(DTYPES)}")
    if min(options.ranks, options.rounds, options.heads, options.head_dim, *options.seq) < 1:
        raise RefusedError("--ranks, --rounds, --heads, --head-dim and --seq have to be 1 or more")
    ranks = int(os.environ["WORLD_SIZE"]) if options.on == "torchrun" else options.ranks
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if options.on == "torchrun" else ranks
    per_node, kv_heads = options.ranks_per_node or local, options.kv_heads or options.heads
    if per_node < 1 or ranks % per_node:
        raise RefusedError(f"--ranks-per-node {per_node} does not divide {ranks} ranks")
    if options.heads % kv_heads:
        raise RefusedError(f"--heads {options.heads} is not a multiple of --kv-heads {kv_heads}")
    for seq in options.seq:
        if even_length(seq, ranks) != seq:
            raise RefusedError(
                f"--seq {seq} does not deal out evenly to {ranks} ranks; use {even_length(seq, ranks)}"
            )
    shape = (ranks // per_node, per_node)
    sizes = (options.heads, kv_heads, options.head_dim)
    causal = options.mask == "causal"
    return [Case(*shape, seq // ranks, *sizes, DTYPES[d], causal) for d in options.dtype for seq in options.seq]


def _check_memory(cases: Sequence[Case], on: str) -> None:
    """Refuse what does not fit; under torchrun each rank may have a machine of its own, or a GPU."""
    on_gpu = on != "processes" and torch.cuda.is_available()
    room_bytes = torch.cuda.mem_get_info()[0] if on_gpu else None
    for case in cases:
        here = {"virtual": 1, "torchrun": 1 if on_gpu else case.ranks_per_node, "processes": case.ranks}[on]
        change = "--ranks, --seq or --heads"
        check_ranks(here, bytes_per_rank(case, on == "virtual"), change, room_bytes=room_bytes)


def _join_torchrun() -> int:
    """The rank of this process among those that torchrun started."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return dist.get_rank()


def _measure(case: Case, chosen: Sequence[Contender], options: argparse.Namespace) -> list[Row]:
    """The rows of one case: of a contender its best configuration, or why it has none."""
    reasons = {c.name: _reason(c, case, options.on) for c in chosen}
    able = {c.name: c.configurations(case) for c in chosen if not reasons[c.name]}
    if options.on == "virtual":  # the ring alone: nothing is exchanged inside nodes
        able = {name: found[:1] for name, found in able.items()}
        every = [virtual_rank(case, able, options.rounds)]
    elif options.on == "torchrun":
        every = _gathered(group_rank(dist.get_rank(), case, able, options.rounds))
    else:
        arguments = (case, able, options.rounds)
        every = run_ranks(group_rank, case.ranks, *arguments, timeout_s=options.timeout_s)
    found = Found(case, every, virtual=options.on == "virtual")
    return [found.row(c.name, [each.name for each in able.get(c.name, ())]) | reasons[c.name] for c in chosen]


def _reason(contender: Contender, case: Case, on: str) -> dict[str, str]:
    """Why a contender is not measured; empty if it is."""
    if on == "virtual" and not isinstance(contender, Burst):
        return {"refused": "a virtual ring is one of this project's"}
    if on == "torchrun" and torch.cuda.is_available() and not isinstance(contender, Burst):
        return {"refused": "peers run on CPUs here, on stand-ins for the GPU packages that they ask for"}
    absent = contender.absent()  # which tries imports in forked processes: not where a GPU is in use
    if absent is not None:
        return {"absent": absent}
    if not contender.configurations(case):
        return {"refused": contender.refuse(case) or "none of its configurations can do this case"}
    return {}


def _gathered(mine: Measured) -> list[Measured]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every
