"""Trains a small model with DeepSpeed, ZeRO-3 and burst attention: every sequence is spread over all ranks.

    torchrun --nproc-per-node 8 examples/deepspeed/train.py
    deepspeed --num_gpus 8 examples/deepspeed/train.py

`--model qwen3_5` trains a hybrid model, in which three of four layers carry a state (a gated delta net).
Only the block "burst_attention" in ds_config.json and `install()` say so; the loop is DeepSpeed's own. With
`--config examples/deepspeed/ds_config_long.json` it trains with all that saves memory; of ZeRO-3 the sizes there are
those of a model of this width, of which no more is held than is at work.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from data import samples, train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import burst_plugin.deepspeed

HERE = Path(__file__).parent


def main() -> None:
    options = parse()
    burst_plugin.deepspeed.install()
    config = json.loads(Path(options.config).read_text())
    config["burst_attention"]["enabled"] = not options.off

    tokenizer = train_tokenizer(options.vocabulary, options.data)
    model = build_model(options)
    if "keep_attention" in config["burst_attention"]:
        model.gradient_checkpointing_enable()
    count = options.steps * config["gradient_accumulation_steps"]
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=samples(tokenizer, options.seq_length, count, options.data),
        config=config,
    )
    if engine.global_rank == 0:
        print(f"{engine.world_size} ranks, {sum(p.ds_numel for p in model.parameters()):,} parameters", flush=True)
        if options.off:
            print("burst attention is off", flush=True)
    save(train(engine, loader), options.out, engine.global_rank)


def build_model(options: argparse.Namespace) -> Any:
    """The same on every rank."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": options.vocabulary,
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "max_position_embeddings": options.seq_length,
    }
    if options.model == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig  # which releases before 5.2 do not have

    head_dim = options.hidden // options.heads
    state = {
        "linear_num_key_heads": options.kv_heads,
        "linear_num_value_heads": options.heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
    }
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **state, head_dim=head_dim))


def train(engine: Any, loader: Any, every: int = 1) -> list[dict[str, float]]:
    """DeepSpeed's loop: whole batches go in, and the loss that comes out is that of whole batches.

    every: after how many steps the loss is printed.
    """
    history, losses = [], []
    for batch in loader:
        loss = engine(**{name: x.to(engine.device) for name, x in batch.items()}).loss
        engine.backward(loss)
        losses.append(loss.item())
        done = engine.is_gradient_accumulation_boundary()
        engine.step()
        if done:
            history.append({"loss": sum(losses) / len(losses), "grad_norm": float(engine.get_global_grad_norm())})
            losses.clear()
            if engine.global_rank == 0 and len(history) % every == 0:
                print(f"step {len(history)}: loss {history[-1]['loss']:.4f}", flush=True)
    return history


def save(history: list[dict[str, float]], path: str, rank: int) -> None:
    """Losses and gradient norms of every step, for compare.py."""
    if rank == 0 and path:
        Path(path).write_text(json.dumps(history))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(HERE / "ds_config.json"), help="DeepSpeed's configuration")
    parser.add_argument("--model", choices=("llama", "qwen3_5"), default="llama")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--heads", type=int, default=8, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=2, help="key/value heads")
    parser.add_argument("--vocabulary", type=int, default=1024, help="tokens of the tokenizer, trained on the spot")
    parser.add_argument("--data", help="a text file (default: the sources of Python's standard library)")
    parser.add_argument("--off", action="store_true", help="switch burst attention off, to compare")
    parser.add_argument("--out", default="", help="write losses and gradient norms to this JSON file")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # from DeepSpeed's launcher
    return parser.parse_args()


if __name__ == "__main__":
    main()
