"""What is sent beside ring-flash-attn, measured where either hands bytes to a process group."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.contenders import CONTENDERS, Case, Contender
from benchmarks.contenders.ring_flash_attn import RingFlashAttn
from tests.support.ranks import run_ranks

RANKS = 8
MOST = {(32, 32): 0.77, (64, 8): 0.95}  # by query and key/value heads
CASES = {
    f"{q_heads}/{kv_heads} heads, {nodes} x {RANKS // nodes} ranks": Case(
        nodes, RANKS // nodes, 64, q_heads, kv_heads, 128, torch.bfloat16, causal=True, batch=1
    )
    for q_heads, kv_heads in ((32, 32), (64, 8))
    for nodes in (1,)
}


def _sent(rank: int, contenders: list[Contender]) -> list[dict[str, int]]:
    """Of each: what this rank sends in a forward and a backward pass of every case, whatever it is for."""
    sent, send = 0, dist.ProcessGroup.send

    def counting(group: dist.ProcessGroup, tensors: list[torch.Tensor], *to: Any) -> Any:
        nonlocal sent
        sent += sum(tensor.nbytes for tensor in tensors)
        return send(group, tensors, *to)

    found = []
    with mock.patch.object(dist.ProcessGroup, "send", counting):
        for contender in contenders:
            by_case = {}
            for name, case in CASES.items():
                session = contender.prepare(case, None)
                whole = (
                    torch.zeros(1, RANKS * case.seq, n, 128) for n in (case.q_heads, case.kv_heads, case.kv_heads)
                )
                q, k, v = (session.shard(x.to(case.dtype)).requires_grad_() for x in whole)
                before = sent
                out = session.attend(q, k, v)
                out.backward(torch.zeros_like(out))
                by_case[name] = sent - before
            found.append(by_case)
    return found


def test_a_step_sends_less_than_with_ring_flash_attn() -> None:
    """In bfloat16 under a causal mask: both ring alike, but here queries travel backward where that is less."""
    peer, burst = RingFlashAttn(), CONTENDERS[0]
    reason = peer.absent()
    if reason is not None:
        pytest.skip(reason)
    of_ranks = run_ranks(_sent, RANKS, [burst, peer])
    for name, case in CASES.items():
        mine, theirs = (sum(found[one][name] for found in of_ranks) for one in range(2))
        block = 2 * case.seq * case.kv_heads * case.head_dim  # elements of keys and values
        hops = RANKS * (RANKS - 1)
        assert theirs == hops * block * (2 + 2 + 4) + RANKS * block * 4, "forward, backward, sums once more to owners"
        print(f"{name}: {mine / theirs:.3f}")
        assert mine <= MOST[case.q_heads, case.kv_heads] * theirs, name
