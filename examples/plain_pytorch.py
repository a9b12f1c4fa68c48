"""Attention over one sequence that several ranks share, in plain PyTorch, checked against float64 on one rank.

torchrun --nproc-per-node 4 examples/plain_pytorch.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import burst_plugin


def main(device: torch.device) -> None:
    # The ring, here as nodes of two. Leave ranks_per_node out on a cluster: ranks ask each other for their node.
    cp = burst_plugin.ContextParallel(dist.group.WORLD, ranks_per_node=2)

    torch.manual_seed(0)  # whole tensors [batch, tokens, heads, head dim], the same on every rank
    q, dout = torch.randn(2, 1, 1024, 8, 64, device=device)
    k, v = torch.randn(2, 1, 1024, 2, 64, device=device)

    # Each rank takes its tokens (cp.positions says which), attends to those of all, and gets its gradients.
    local = [cp.shard(x).requires_grad_() for x in (q, k, v)]
    out = burst_plugin.burst_attention(*local, cp)
    out.backward(cp.shard(dout))

    whole = [x.double().requires_grad_() for x in (q, k, v)]
    heads_first = (x.transpose(1, 2) for x in whole)
    truth = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
    truth.backward(dout.double())
    pairs = zip((out.detach(), *(x.grad for x in local)), (truth.detach(), *(x.grad for x in whole)), strict=True)
    errors = [float((cp.unshard(x) - y).norm() / y.norm()) for x, y in pairs]
    if dist.get_rank() == 0:
        print("relative errors of out, dq, dk, dv:", *(f"{error:.1e}" for error in errors))
        print(cp.describe(), cp.traffic(), sep="\n")
    cp.close()


gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
here = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(here)
dist.init_process_group("nccl" if gpu else "gloo", device_id=here if gpu else None)
main(here)
dist.destroy_process_group()
