"""The same with Hugging Face Trainer: `sp_size` of ParallelismConfig, and the block in ds_config.json.

torchrun --nproc-per-node 8 examples/deepspeed/trainer.py
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from accelerate import ParallelismConfig
from data import samples, train_tokenizer
from train import build_model, parse, save
from transformers import Trainer, TrainingArguments

import burst_plugin.deepspeed


def main() -> None:
    options = parse()
    burst_plugin.deepspeed.install()
    config = json.loads(Path(options.config).read_text())
    config["burst_attention"]["enabled"] = not options.off
    del config["optimizer"]  # Trainer makes its own
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            deepspeed=config,
            parallelism_config=ParallelismConfig(sp_size=ranks, sp_backend="deepspeed") if ranks > 1 else None,
            max_steps=options.steps,
            log_level="error",
            per_device_train_batch_size=config["train_micro_batch_size_per_gpu"],
            gradient_accumulation_steps=config["gradient_accumulation_steps"],
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        tokenizer = train_tokenizer(options.vocabulary, options.data)
        count = options.steps * arguments.gradient_accumulation_steps
        trainer = Trainer(
            model=build_model(options),
            args=arguments,
            train_dataset=samples(tokenizer, options.seq_length, count, options.data),
        )
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        history = [{"loss": entry["loss"], "grad_norm": float(entry["grad_norm"])} for entry in logged]
        save(history, options.out, arguments.process_index)


if __name__ == "__main__":
    main()
