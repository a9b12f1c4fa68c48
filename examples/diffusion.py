"""A small video transformer, Wan of diffusers, learns which way a square moves: on a ring of ranks, then on one rank.

torchrun --nproc-per-node 4 examples/diffusion.py
"""

import argparse
import os

import diffusers
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import burst_plugin
from burst_plugin.integrations import diffusion

FRAMES, SIZE = 5, 18  # in latents; with patches of 2 x 2 they are 405 tokens, which 4 ranks hold unequal numbers of
DIRECTIONS = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]], device="cpu")


def small_wan(device: torch.device) -> diffusers.WanTransformer3DModel:
    torch.manual_seed(0)  # every rank begins with the same weights
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=192,
        num_layers=3,
    )
    return model.to(device)


def batch(step: int, device: torch.device, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Return latents [rows, 4, frames, size, size], text [rows, 3, 16] and noise, the same on every rank."""
    draws = torch.Generator().manual_seed(step)
    ways = torch.randint(4, (rows,), generator=draws)
    videos = torch.zeros(rows, 4, FRAMES, SIZE, SIZE)
    corners = torch.randint(5, SIZE - 9, (rows, 2), generator=draws)
    for video, way, corner in zip(videos, ways, corners, strict=True):
        for frame in range(FRAMES):
            y, x = (corner + frame * DIRECTIONS[way]).tolist()
            video[:, frame, y : y + 4, x : x + 4] = 1
    words = torch.nn.functional.one_hot(ways, 16).float().unsqueeze(1).expand(rows, 3, 16)
    return videos.to(device), words.to(device), torch.randn(videos.shape, generator=draws).to(device)


def train(model: torch.nn.Module, steps: int, device: torch.device, scale: float = 1.0) -> tuple[list[float], Tensor]:
    """Train with flow matching; return the losses, and the gradients of the first step in one row."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, first = [], torch.empty(0, device=device)
    for step in range(steps):
        videos, words, noise = batch(step, device)
        times = torch.rand(len(videos), generator=torch.Generator().manual_seed(step)).to(device)
        mix = times.view(-1, 1, 1, 1, 1)
        velocity = model((1 - mix) * videos + mix * noise, times * 1000, words).sample
        loss = (velocity - (noise - videos)).square().mean()
        (loss * scale).backward()
        if not step:
            first = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, first


def main(device: torch.device, steps: int) -> None:
    cp = burst_plugin.ContextParallel(dist.group.WORLD)
    wan = diffusion.prepare(small_wan(device), cp)
    # A rank's gradients are those that its own tokens make. DDP takes their mean, and training needs their sum.
    on_ring = train(DistributedDataParallel(wan), steps, device, scale=cp.ranks)
    if cp.rank == 0:
        alone = small_wan(device)
        on_one = train(alone, steps, device)
        weights = [torch.cat([x.detach().flatten() for x in model.parameters()]) for model in (wan, alone)]
        print(f"{'':24}{cp.ranks} ranks{'':10}1 rank{'':11}largest difference")
        losses = [f"{loss[0]:.4f} -> {loss[-1]:.4f}" for loss in (on_ring[0], on_one[0])]
        furthest = max(abs(a - b) for a, b in zip(on_ring[0], on_one[0], strict=True))
        print(f"{'loss':24}{losses[0]}{'':3}{losses[1]}{'':3}{furthest:.1e}")
        for name, (ring, one) in (("first gradient", (on_ring[1], on_one[1])), ("weights", weights)):
            print(f"{name + ', norm':24}{ring.norm():<17.5g}{one.norm():<17.5g}{(ring - one).abs().max():.1e}")
    dist.barrier()
    cp.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    here = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(here)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=here if gpu else None)
    main(here, arguments.steps)
    dist.destroy_process_group()
