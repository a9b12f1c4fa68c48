"""A tiny Llama in Hugging Face's Trainer, on sequences that all ranks share.

torchrun --nproc-per-node 2 -m burst_plugin.run --framework deepspeed train.py

On CPUs write --cpu before train.py.

The block "burst_attention" of ds.json and lines 1 and 2 are what a script of your own needs.
"""

import os

import torch
from accelerate import ParallelismConfig
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import burst_plugin.deepspeed

TOKENS, VOCABULARY, STEPS = 2048, 256, 5


def main() -> None:
    burst_plugin.deepspeed.install()  # 1. before Trainer; `-m burst_plugin.run` does it, too
    arguments = TrainingArguments(
        output_dir="out",
        deepspeed="ds.json",
        parallelism_config=ParallelismConfig(  # 2. how many ranks share a sequence
            sp_size=int(os.environ["WORLD_SIZE"]), sp_backend="deepspeed"
        ),
        bf16=torch.cuda.is_available(),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ids = torch.arange(TOKENS).square() % 251
    Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=[{"input_ids": ids, "labels": ids}] * STEPS,
    ).train()


if __name__ == "__main__":
    main()
