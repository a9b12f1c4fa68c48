"""Trains a small Qwen3-VL with DeepSpeed, ZeRO-3 and burst attention to read numbers off images.

    torchrun --nproc-per-node 8 examples/deepspeed/images.py

A sample is a row of images, each followed by its number, which the place of a bar says. Every rank encodes its share
of the images, and holds its share of the tokens: 64 images are 448 tokens. The loop is that of train.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from train import save, train

import burst_plugin.deepspeed

HERE = Path(__file__).parent
SIDE, PATCH, NUMBERS = 16, 4, 10  # an image is SIDE x SIDE; four patches become one token
START, END, IMAGE, VIDEO, VOCABULARY = 10, 11, 12, 13, 16
TOKENS = (SIDE // PATCH) ** 2 // 4


def main() -> None:
    options = parse()
    burst_plugin.deepspeed.install()
    config = json.loads(Path(options.config).read_text())
    config["burst_attention"]["enabled"] = not options.off
    config["gradient_accumulation_steps"] = 1
    model = build_model(options)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=[sample(options.images, seed) for seed in range(options.steps)],
        collate_fn=collate,
        config=config,
    )
    if engine.global_rank == 0:
        print(f"{engine.world_size} ranks, {sum(p.ds_numel for p in model.parameters()):,} parameters", flush=True)
    history = train(engine, loader, every=10)
    save(history, options.out, engine.global_rank)
    unseen = sample(options.images, options.steps)
    right = read(engine, unseen)
    if engine.global_rank == 0:
        print(f"it reads {right} of {options.images} images that it has not seen", flush=True)


def build_model(options: argparse.Namespace) -> Any:
    """The same on every rank."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    hidden = options.hidden
    shared = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "initializer_range": 0.08}
    text = {
        **shared,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [hidden // 16, hidden // 32, hidden // 32],
            "mrope_interleaved": True,
        },
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    vision = {
        **shared,
        "depth": 2,
        "num_heads": 4,
        "patch_size": PATCH,
        "temporal_patch_size": 1,
        "out_hidden_size": hidden,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, **tokens, vision_end_token_id=END)
    )


def sample(images: int, seed: int) -> dict[str, torch.Tensor]:
    """A row of images and their numbers, as Qwen's processor returns it; only numbers have labels."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, NUMBERS, (images,), generator=generator)
    columns = torch.arange(SIDE) - numbers.unsqueeze(1)
    bars = ((columns >= 0) & (columns < 3)).float()[:, None, None].expand(images, 3, SIDE, SIDE)
    pixels = bars + 0.1 * torch.randn(bars.shape, generator=generator)
    blocks = SIDE // PATCH // 2  # of 2 x 2 patches, which follow each other
    patches = pixels.view(images, 3, blocks, 2, PATCH, blocks, 2, PATCH).permute(0, 2, 5, 3, 6, 1, 4, 7)
    parts = [torch.full((images, 1), START), torch.full((images, TOKENS), IMAGE), torch.full((images, 1), END)]
    ids = torch.cat([*parts, numbers[:, None]], 1)
    labels = torch.full_like(ids, -100)
    labels[:, -1] = numbers
    return {
        "input_ids": ids.flatten(),
        "labels": labels.flatten(),
        "mm_token_type_ids": (ids == IMAGE).int().flatten(),
        "pixel_values": patches.reshape(-1, 3 * PATCH * PATCH),
        "image_grid_thw": torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * images),
    }


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows become a batch; patches and grids of all rows follow each other."""
    whole = ("pixel_values", "image_grid_thw")
    return {
        name: (torch.cat if name in whole else torch.stack)([one[name] for one in samples]) for name in samples[0]
    }


def read(engine: Any, one: dict[str, torch.Tensor]) -> int:
    """How many numbers the model reads right, each rank by itself."""
    batch = {name: x.to(engine.device) for name, x in collate([one]).items()}
    labels = batch.pop("labels")
    engine.eval()
    with torch.no_grad():
        best = engine(**batch, use_cache=False).logits.argmax(-1)
    return int((best[:, :-1] == labels[:, 1:]).sum())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(HERE / "ds_config.json"), help="DeepSpeed's configuration")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--images", type=int, default=64, help="of a sample")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    parser.add_argument("--off", action="store_true", help="switch burst attention off, to compare")
    parser.add_argument("--out", default="", help="write losses and gradient norms to this JSON file")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # from DeepSpeed's launcher
    return parser.parse_args()


if __name__ == "__main__":
    main()
