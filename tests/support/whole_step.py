"""What a whole training step with DeepSpeed takes of a GPU, at its real size, on GPUs that are not there.

    found = whole_step(MODELS["llama3_8b"], setting)           # in a process of its own
    found.peak, found.host_pages                               # bytes of rank 0's GPU, and what it parks on its host
    found.shapes                                               # what was there at the peak: (bytes, shape, type)

The model is that of transformers, in bfloat16; weights, gradients and the optimizer are sharded by DeepSpeed's own
engine; attention runs on the ring; all with the configuration that a plan writes. Two steps are made, of which the
second finds the buffers of the first. Whatever tensors take of the GPU counts, and what the attention kernel
allocates inside. Not seen are workspaces of other kernels, the memory of CUDA and NCCL, and gaps between tensors.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import pickle
import subprocess
import sys
import traceback
from dataclasses import dataclass
from typing import IO, Any

import torch

from burst_plugin.activations import host_memory
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.setting import Setting
from tests.support.fake_gpu import GPU
from tests.support.live_bytes import LiveBytes
from tests.support.measured_step import transformers_config
from tests.support.pretended_gpu import import_beforehand, pretended_gpus, values

_STEPS = 2
_OPTIMIZERS = "deepspeed.runtime.zero.muon.muon_optimizer"  # engines import it, and it PyTorch's compiler


@dataclass(frozen=True)
class WholeStep:
    """What rank 0 took: bytes at the peak, of pages on the host, and the tensors of the peak."""

    peak: int
    host_pages: int
    shapes: list[tuple[int, tuple[int, ...], torch.dtype]]


def whole_step(shape: ModelShape, setting: Setting) -> WholeStep:
    """Make the steps in a process of their own. Raise RuntimeError with what that process wrote if it fails."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    pickle.dump((shape, setting), server.stdin)
    server.stdin.flush()
    found = pickle.load(server.stdout)
    if isinstance(found, str):
        raise RuntimeError(found)
    assert isinstance(found, WholeStep)
    return found


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """Return a process that has imported the frameworks, which takes 6 s, and forks one for every request."""
    environment = os.environ | {"DS_ACCELERATOR": "cuda", "LOCAL_RANK": "0"}
    command = [sys.executable, "-m", "tests.support.whole_step"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _serve(answers: IO[bytes]) -> None:
    """Answer requests until there are no more, since the process that made them has ended."""
    frameworks = "deepspeed", _OPTIMIZERS, "transformers.trainer", "burst_plugin.deepspeed"
    models = (f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3"))
    import_beforehand(*frameworks, *models)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    with contextlib.suppress(EOFError):
        while True:
            answers.write(_forked(*pickle.load(sys.stdin.buffer)))
            answers.flush()


def _forked(shape: ModelShape, setting: Setting) -> bytes:
    """Return what a forked process has measured, or how it failed, pickled."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.environ["LOCAL_WORLD_SIZE"] = str(setting.inner)
        found: WholeStep | str
        try:
            found = _measured(shape, setting)
        except BaseException:
            found = traceback.format_exc()[-4000:]
        with open(writable, "wb") as pipe:
            pipe.write(pickle.dumps(found))
        os._exit(0)
    os.close(writable)
    with open(readable, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer or pickle.dumps("the process ended without an answer")


def _measured(shape: ModelShape, setting: Setting) -> WholeStep:
    with pretended_gpus(setting.topology), LiveBytes(device="cuda") as live:
        engine = engine_of(shape, setting, "torch_flash")
        batch = _batch(setting.tokens)
        live.peak = 0  # of the steps, whatever it took to make the model
        for _ in range(_STEPS):
            engine.backward(engine(**batch, use_cache=False).loss)
            engine.step()
    parked = host_memory.BY_DEVICE.get(GPU)
    return WholeStep(live.peak, 0 if parked is None else parked.pool.nbytes, live.shapes)


def engine_of(shape: ModelShape, setting: Setting, kernel: str) -> Any:
    """Return DeepSpeed's engine with the model, as the files of a plan say."""
    import deepspeed
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator
    from transformers import AutoModelForCausalLM

    from burst_plugin.deepspeed import engine_session, install, model_hooks
    from burst_plugin.deepspeed.planning import files

    for module in (partition_parameters, partitioned_param_coordinator):
        module.assert_ints_same_as_other_ranks = lambda _: None
    model_hooks.tolerance_of = lambda *_: math.inf  # of losses, which are numbers that are not there
    model_hooks.ModelHooks.check_labels = lambda *_: None  # which counts those of ranks that are not there
    engine_session.Session.check_weight = lambda *_: None  # which compares numbers that are not there
    install()
    config, arguments = (json.loads(text) for text in files(shape, setting).values())
    config["burst_attention"]["kernel"] = kernel
    config["zero_force_ds_cpu_optimizer"] = False  # its own is compiled, and takes the same
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = AutoModelForCausalLM.from_config(
            transformers_config(shape, setting, tie_word_embeddings=shape.tied), dtype=torch.bfloat16
        ).train()
    if arguments["gradient_checkpointing"]:
        model.gradient_checkpointing_enable(arguments["gradient_checkpointing_kwargs"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]


def _batch(tokens: int) -> dict[str, Any]:
    """Return this rank's shard of a sequence, on the GPU. It is cut outside, since cutting reads it."""
    from burst_plugin.deepspeed import shard_batch

    with values():
        ids = torch.zeros(1, tokens, dtype=torch.long)
        local = shard_batch({"input_ids": ids, "labels": ids})
    return {
        name: torch.empty(x.shape, dtype=x.dtype, device=GPU) if isinstance(x, torch.Tensor) else x
        for name, x in local.items()
    }


if __name__ == "__main__":
    real, sys.stdout = sys.stdout, sys.stderr  # to which frameworks write
    from tests.support import whole_step as named  # what is pickled has to have a module's name

    named._serve(real.buffer)
