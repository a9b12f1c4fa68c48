"""A tiny language model over one long sequence that all ranks share, in plain PyTorch.

torchrun --nproc-per-node 2 train.py

Lines 1 to 5 are what a script of your own needs.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import burst_plugin

TOKENS, VOCABULARY, WIDTH, HEADS = 4096, 256, 64, 4


class Model(nn.Module):
    """One layer of attention between an embedding and a head."""

    def __init__(self, cp: burst_plugin.ContextParallel) -> None:
        super().__init__()
        self.cp = cp
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        q, k, v = self.qkv(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2)  # [batch, local tokens, heads, head dim]
        attended = burst_plugin.burst_attention(q, k, v, self.cp)  # 4. in the place of scaled_dot_product_attention
        return self.head(hidden + self.out(attended.flatten(2)))


def main(device: torch.device) -> None:
    cp = burst_plugin.ContextParallel(dist.group.WORLD)  # 1. once, of the ranks that share a sequence
    torch.manual_seed(0)  # the same weights on every rank
    model = Model(cp).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.arange(TOKENS + 1, device=device).square() % 251
    ids, labels = (cp.shard(x[None]) for x in (text[:-1], text[1:]))  # 2. this rank's tokens, with their labels
    # 3. where positions are needed, as for rotary embedding: cp.positions(TOKENS)
    for step in range(20):
        loss = cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / TOKENS
        optimizer.zero_grad()
        loss.backward()
        for tensor in (loss.detach(), *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor, group=cp.group)  # 5. losses and gradients of ranks add up
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    cp.close()


if __name__ == "__main__":
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    here = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(here)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=here if gpu else None)
    main(here)
    dist.destroy_process_group()
