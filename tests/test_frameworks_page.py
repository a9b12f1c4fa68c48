"""Lines of docs/frameworks.md: what can run on CPUs runs, and trains as one rank does; the rest is parsed."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from tests.support.launched import launched
from tests.support.ranks import run_ranks

PAGE = (Path(__file__).parents[1] / "docs" / "frameworks.md").read_text()

SCRIPT = """
import sys, torch, transformers
from accelerate import Accelerator
from tests.support.deepspeed_run import build, draw, Run
kind = sys.argv[1]
rows = [{name: x[0] for name, x in batch.items()} for batch in draw(4, rows=1)]
class ByDots(transformers.Trainer):
    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            print(f"loss {self.args.process_index} {logs['loss']:.5f}\\n", end="", flush=True)
if kind == "loop":
    accelerator = Accelerator()
    model = build(Run())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(rows, batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {accelerator.process_index} {loss.item():.5f}\\n", end="", flush=True)
else:
    arguments = transformers.TrainingArguments(
        sys.argv[2], deepspeed=sys.argv[3], per_device_train_batch_size=1, learning_rate=0.1, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, report_to="none", save_strategy="no",
        disable_tqdm=True, train_sampling_strategy="sequential", num_train_epochs=1,
    )
    ByDots(model=build(Run()), args=arguments, train_dataset=rows).train()
"""


def blocks(language: str) -> list[str]:
    """Code of the page."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def _block_with(language: str, word: str) -> str:
    (found,) = [each for each in blocks(language) if word in each]
    return found


def _launch(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Read the page's command as Accelerate does; return what it would start, and in which environment."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    config = yaml.safe_load(_block_with("yaml", "sp_backend").replace(": 8", ": 2"))
    config["deepspeed_config"]["deepspeed_config_file"] = str(folder / "ds.json")
    (folder / "sp.yaml").write_text(yaml.safe_dump(config))
    settings = json.loads(_block_with("json", "burst_attention"))
    settings |= {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }
    settings["zero_optimization"]["stage"] = 2  # with 3 transformers draws other weights
    (folder / "ds.json").write_text(json.dumps(settings))
    (folder / "train.py").write_text(SCRIPT)
    words = shlex.split(_block_with("bash", "accelerate launch"))
    files = {name: str(folder / name) for name in ("sp.yaml", "train.py")}
    with mock.patch.object(launch, "deepspeed_launcher") as start:
        launch.launch_command(
            launch.launch_command_parser().parse_args([files.get(word, word) for word in words[2:]])
        )
    (arguments,) = start.call_args.args
    arguments.main_process_port = 0  # any that is free
    _, environment = prepare_deepspeed_cmd_env(arguments)
    assert arguments.module
    return ["-m", arguments.training_script, *arguments.training_script_args], environment


def _one_rank() -> list[float]:
    from tests.support.deepspeed_run import Run, build, draw

    model, losses = build(Run()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in draw(4, rows=1):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.deepspeed
@pytest.mark.parametrize("kind", ["loop", pytest.param("trainer", marks=pytest.mark.slow)])
def test_accelerate_launch(kind: str, tmp_path: Path) -> None:
    for name in ("deepspeed", "accelerate", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    command, environment = _launch(tmp_path)
    command.insert(command.index("deepspeed") + 1, "--cpu")
    command += [kind, str(tmp_path / "out"), str(tmp_path / "ds.json")]
    with mock.patch.dict(os.environ, environment):
        done = launched(command, ranks=2, imports=["deepspeed", "transformers", "accelerate"])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "burst_plugin: context_parallel_size=2: " in done.stdout
    losses = [float(each) for each in re.findall(r"loss 0 (\d+\.\d{5})", done.stdout)]
    assert losses == pytest.approx(_one_rank(), abs=3e-5)


def _installed(rank: int) -> bool:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    before = TransformerLayer.__init__
    exec(_block_with("python", "burst_install.py"), {})
    return TransformerLayer.__init__ is not before


@pytest.mark.megatron
def test_the_module_for_workers_installs_the_plugin() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    assert run_ranks(_installed, 1, init=False) == [True]


def test_options_on_the_page_exist() -> None:
    from burst_plugin import Strategy
    from burst_plugin.run import parse_arguments

    call: Any = re.search(r"ContextParallel\(group, (.*)\)", _block_with("python", "fully_shard"))
    assert eval(f"Strategy({call.group(1)})", {"Strategy": Strategy})
    for block in blocks("python"):
        compile(block, "page", "exec")
    commands = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    for line in commands:
        words = shlex.split(line)
        if "burst_plugin.run" in words:
            options = parse_arguments(words[words.index("burst_plugin.run") + 1 :])
            assert options.framework in ("deepspeed", "megatron")
            assert options.script.endswith(".py")
    assert sum("burst_plugin.run" in line for line in commands) == 5
    assert all(json.loads(each) for each in blocks("json"))
