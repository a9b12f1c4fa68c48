"""Generation over a cache that several ranks share, in plain PyTorch: two turns, compared with those of one rank.

torchrun --nproc-per-node 4 examples/kv_cache.py
"""

import torch
import torch.distributed as dist

from burst_plugin import ContextParallel
from burst_plugin.inference import KVCache

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 2, 8, 2, 32, 512


class Model(torch.nn.Module):
    """A transformer of attention alone, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, HEADS * DIM)
        self.qkv = torch.nn.ModuleList(
            torch.nn.Linear(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM) for _ in range(LAYERS)
        )

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Return logits [B, n, vocabulary] of this rank's tokens `ids` [B, n]."""
        x = self.embed(ids) + torch.sin(positions.unsqueeze(-1) / 10.0 ** torch.linspace(0, 3, HEADS * DIM))
        for layer, qkv in enumerate(self.qkv):
            q, k, v = qkv(x).unflatten(-1, (-1, DIM)).split((HEADS, KV_HEADS, KV_HEADS), dim=2)
            x = x + cache.attend(layer, q, k, v).flatten(2)
        return x @ self.embed.weight.T


@torch.no_grad()
def generate(model: Model, cache: KVCache, prompts: list[torch.Tensor], count: int) -> torch.Tensor:
    """Return `count` tokens after each of the prompts, which follow what is cached: [B, count]."""
    lengths, new = [len(prompt) for prompt in prompts], torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    found: list[torch.Tensor] = []
    while len(found) < count:
        turn = cache.begin(lengths, ids=new)
        logits = model(turn.take(new), turn.positions, cache)
        found.append(cache.gather(logits, last=True).argmax(-1))  # the same on every rank
        lengths, new = [1] * len(prompts), found[-1].unsqueeze(1)
    cache.finish()
    return torch.stack(found, 1)


def talk(cp: ContextParallel) -> tuple[torch.Tensor, KVCache]:
    """Return what is said in two turns, and the cache."""
    torch.manual_seed(0)  # the same model and prompts on every rank
    model, cache = Model(), KVCache(cp, LAYERS)
    turns = [[torch.randint(VOCABULARY, (n,)) for n in lengths] for lengths in ((2000, 1200), (100, 300))]
    return torch.cat([generate(model, cache, prompts, 20) for prompts in turns], 1), cache


dist.init_process_group("gloo")
cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)  # nodes of two; on a cluster leave ranks_per_node out
said, cache = talk(cp)
alone, whole = talk(ContextParallel(hierarchy=[1]))
same, held = torch.equal(said, alone), f"{cache.bytes} of {whole.bytes} bytes"
print(f"rank {cp.rank}: same tokens as one rank: {same}, cache {held}, sent {cache.bytes_sent}\n", end="")
cp.close()
dist.destroy_process_group()
