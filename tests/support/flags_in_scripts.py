"""Flags of `burst plan --emit` in a Megatron-LM checkout: what its scripts' parser and model builder make of them.

    python -m tests.support.flags_in_scripts TREE FOLDER

prints, as JSON, what became of each model of `tests.support.model_configs`: by how much its logits differ from those
of transformers, or why no flags were written; and the fields of TransformerConfig of which
`tests.support.megatron_arguments` says something else.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from burst_plugin.megatron import cpu

# What has to be said on a CPU, and what the plan leaves to the user.
_BESIDES = """
--distributed-backend gloo --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
--no-rope-fusion --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer
""".split()  # noqa: SIM905


def main(tree: Path, folder: Path) -> None:
    """Print what becomes of every model."""
    cpu.prepare(tree)
    from burst_plugin.megatron import install

    install()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    from tests.support.model_flags import cases

    print("\n" + json.dumps({name: _outcome(*case) for name, case in cases(folder).items()}))


def _outcome(model: Any, config: dict[str, Any]) -> Any:
    from burst_plugin.megatron.planning import files, space
    from burst_plugin.training.setting import Setting
    from tests.support.model_flags import TOKENS, gap

    try:
        (text,) = files(model, Setting(tokens=TOKENS, code=space(True).code)).values()
    except ValueError as error:
        return str(error)
    words = text.replace("--bf16", "").replace("transformer_engine", "local").split()
    args = _parsed([*words, *_BESIDES])
    args.padded_vocab_size = args.vocab_size  # as with a tokenizer of this size
    from gpt_builders import gpt_builder

    target = gpt_builder(args, pre_process=True, post_process=True)
    return [gap(target, config), _told_apart(model, target.config)]


def _parsed(words: list[str]) -> Any:
    """Return Megatron-LM's arguments, as its scripts have them."""
    from megatron.training import arguments, global_vars

    sys.argv = ["pretrain_gpt.py", *words]
    args = arguments.parse_args()
    arguments.validate_args(args)
    global_vars._GLOBAL_ARGS = args
    return args


def _told_apart(model: Any, config: Any) -> list[str]:
    """Return the fields that `tests.support.megatron_arguments` sets to something else."""
    from burst_plugin.megatron.flags.model_flags import model_flags
    from burst_plugin.megatron.releases import target_version
    from tests.support.megatron_arguments import parse

    fields, _ = parse(" ".join(model_flags(model, 1, target_version())).split())
    return [name for name, value in fields.items() if getattr(config, name) != value]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
