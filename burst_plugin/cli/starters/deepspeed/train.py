"""A tiny Llama in DeepSpeed, on sequences that all ranks share.

torchrun --nproc-per-node 2 -m burst_plugin.run --framework deepspeed train.py

On CPUs write --cpu before train.py.

The block "burst_attention" of ds.json and lines 1 and 2 are what a script of your own needs.
"""

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import burst_plugin.deepspeed

TOKENS, VOCABULARY = 2048, 256


def main() -> None:
    burst_plugin.deepspeed.install()  # 1. before deepspeed.initialize; `-m burst_plugin.run` does it, too
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="burst",  # 2. optional: other implementations are replaced
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
    ids = (torch.arange(TOKENS, device=engine.device).square() % 251)[None]
    for step in range(5):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss  # whole batches: the model cuts them
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
