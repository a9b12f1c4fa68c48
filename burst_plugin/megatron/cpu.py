"""Run Megatron-core on a machine without a GPU, with gloo: for tests, examples and reading in a debugger.

Megatron-core asks for CUDA devices by name in many places. ``enable()`` answers those requests with the CPU,
from outside Megatron's own files, for the whole process::

    from burst_plugin.megatron import cpu

    cpu.enable()                                     # before or after importing megatron.core, see `enable`
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=4)

A Megatron-LM checkout's own scripts, which want a little more, run unmodified as::

    torchrun --nproc-per-node 4 -m burst_plugin.run --cpu Megatron-LM/pretrain_gpt.py \\
        --distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion \\
        --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --num-workers 0 \\
        --context-parallel-size 4 --cp-comm-type burst ...

Importing this module changes nothing. There is no way back within the process. Threads that the program
starts itself still see the unchanged tensor functions, because torch keeps its function modes per thread.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from burst_plugin.frameworks.wrapping import wrap

_REPORT = "_burst_plugin_cpu_report"  # kept on torch.cuda, beside what it tells of
_CPU = torch.device("cpu")
# What Megatron takes its optimizers and norms from, if it is there: they launch CUDA kernels on any tensor.
_CUDA_PACKAGES = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C", "fused_weight_gradient_mlp_cuda")


def enable(*, force: bool = False) -> list[str]:
    """Redirect CUDA to the CPU for this process, so that Megatron-core runs with gloo.

    Calling it again changes nothing and returns the same lines.

    Args:
        force: go on although this machine has a usable GPU, which then stays unused.

    Returns:
        One line of plain English for each kind of redirection.

    Raises:
        RuntimeError: this machine has a usable GPU and ``force`` is false; or Megatron-core has been imported already
            and taken optimizers from Transformer Engine or Apex, which need one.
    """
    done: list[str] | None = getattr(torch.cuda, _REPORT, None)
    if done is not None:
        return list(done)
    if torch.cuda.is_available() and not force:
        raise RuntimeError(
            f"burst_plugin.megatron.cpu.enable(): got {torch.cuda.device_count()} usable GPUs, expected 0: "
            "it would hide them from the whole process. Leave the call out to train on the GPUs, "
            "or set CUDA_VISIBLE_DEVICES= to hide them, or pass force=True to use the CPU all the same."
        )
    lines = [hide_cuda_packages(), _set_environment(), _stop_compilers()]
    for meaning, replacements in _replacements().items():
        _replace(replacements)
        lines.append(f"torch.cuda: {', '.join(sorted(replacements))} {meaning}")
    torch.accelerator.current_accelerator = _answer(None)  # else CUDA builds of torch would ask the driver
    lines.append("torch.accelerator: there is none")
    _run_lazy_calls_at_once()
    _keep_redirecting_in_backward()
    contextlib.ExitStack().enter_context(_CudaToCpu())  # for good: nothing closes the stack
    lines.append("tensors: device cuda means cpu; cuda(), pin_memory(), record_stream() do nothing")
    lines.append("tensors: type() answers torch.cuda.*")
    lines.append(_keep_messages())
    setattr(torch.cuda, _REPORT, lines)
    return list(lines)


# ---------------------------------------------------------------------------------------------------- tensors


class _CudaToCpu(TorchFunctionMode):
    """Every torch function that is given a CUDA device gets the CPU instead."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type:
            return _tensor_type(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"], index=True)
        if func is torch.device:
            named = args[0] if args else next(iter(kwargs.values()), None)
            return _CPU if _on_cpu(named, index=True) is _CPU else func(*args, **kwargs)
        index = func in (torch.Tensor.to, torch._C._nn._parse_to)
        return func(*(_on_cpu(arg, index=index) for arg in args), **kwargs)


def prepare(directory: Path) -> list[str]:
    """Get ready for a script in `directory`; those of a Megatron-LM checkout want a little more than others.

    Returns:
        As `enable()`.
    """
    from burst_plugin.megatron import cpu_scripts

    for checkout in (directory, directory.parent):  # scripts lie in its root, or in tools/
        if cpu_scripts.is_checkout(checkout):
            return [*enable(), *cpu_scripts.prepare_training_scripts(checkout)]
    return enable()


def _on_cpu(value: Any, *, index: bool) -> Any:
    """The CPU where ``value`` names a CUDA device (by a bare number only if ``index``), else ``value``."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return _CPU if value == "cuda" or value.startswith("cuda:") else value
    if index and isinstance(value, int) and not isinstance(value, bool):
        return _CPU
    return value


def _keep_redirecting_in_backward() -> None:
    """Keep the mode on in backward passes.

    torch turns a function mode off for all that runs inside a function handled by it, and backward is one.
    Without this, forwards that are recomputed during a backward would ask for CUDA again.
    """
    run_backward = vars(torch.autograd)["_engine_run_backward"]

    @functools.wraps(run_backward)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        with _CudaToCpu():
            return run_backward(*args, **kwargs)

    vars(torch.autograd)["_engine_run_backward"] = redirected


def _tensor_type(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """``Tensor.type``: Megatron's optimizers only take tensors that call themselves torch.cuda.*Tensor."""
    if dtype is None:
        return tensor.type().replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return tensor.type(dtype, non_blocking, **kwargs)


# ------------------------------------------------------------------------------------------------- torch.cuda


class _Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class _Event:
    """An event that has happened as soon as it is recorded; it keeps the time of the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: _Event) -> float:
        """Milliseconds from this event to ``end_event``, as torch.cuda.Event has it."""
        return (end_event._recorded_s - self._recorded_s) * 1e3


def _answer(value: Any) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _device_count() -> int:
    """As many devices as ranks on this machine, by the launcher's LOCAL_WORLD_SIZE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextlib.contextmanager
def _range(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _replacements() -> dict[str, dict[str, Any]]:
    """What takes the place of names in torch.cuda: {what the replacements do: {name: replacement}}."""
    properties = types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=0, multi_processor_count=os.cpu_count() or 1
    )
    generator = torch.default_generator
    stream = _Stream()
    quiet = (
        "synchronize set_device set_stream empty_cache reset_peak_memory_stats init ipc_collect "
        "nvtx.range_push nvtx.range_pop nvtx.mark"
    )
    zero = (
        "current_device memory_allocated max_memory_allocated memory_reserved max_memory_reserved "
        "utilization temperature power_draw clock_rate"
    )
    answers = {
        "is_available": _answer(True),
        "is_initialized": _answer(True),
        "is_bf16_supported": _answer(True),
        "is_current_stream_capturing": _answer(False),
        "device_count": _device_count,
        "get_device_name": _answer("cpu"),
        "get_device_capability": _answer((8, 0)),
        "get_device_properties": _answer(properties),
        "memory_stats": lambda *args, **kwargs: defaultdict(int),
        "mem_get_info": _answer((0, 0)),
    }
    answers |= dict.fromkeys(zero.split(), _answer(0))
    seeds = dict.fromkeys(("manual_seed", "manual_seed_all"), generator.manual_seed)
    states = {
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda new_state, device=None: generator.set_state(new_state),
        "initial_seed": generator.initial_seed,
        "default_generators": (generator,) * max(1, _device_count()),
    }
    streams: dict[str, Any] = {"Stream": _Stream, "ExternalStream": _Stream, "Event": _Event}
    streams |= dict.fromkeys(("current_stream", "default_stream", "stream"), _answer(stream))
    contexts = {"device": _range, "nvtx.range": _range}
    return {
        "answer as for one idle device": answers,
        "do nothing": dict.fromkeys(quiet.split(), _answer(None)) | contexts,
        "use the CPU generator": seeds | states,
        "are stand-ins": streams,
    }


def _replace(replacements: dict[str, Any]) -> None:
    """Put each replacement into torch.cuda, and into torch.cuda.random and .memory if the name is there."""
    for path, replacement in replacements.items():
        *inner, name = path.split(".")
        setattr(getattr(torch.cuda, inner[0]) if inner else torch.cuda, name, replacement)
        for copy in (torch.cuda.random, torch.cuda.memory):
            if not inner and hasattr(copy, name):
                setattr(copy, name, replacement)


def _run_lazy_calls_at_once() -> None:
    """torch.cuda puts off what Megatron seeds through it until CUDA starts, which it never does here."""

    def call(function: Callable[[], Any], **kwargs: Any) -> None:
        function()

    for module in (torch.cuda, sys.modules.get("megatron.core.tensor_parallel.random")):
        if module is not None:
            vars(module).update(_lazy_call=call, _lazy_init=_answer(None))
    # Both generators of the tracker are now one, so its warning that they should not be says nothing.
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


# -------------------------------------------------------------------------------------------------- messages


def _keep_messages() -> str:
    """Keep the memory of a message until it is sent, as the stream that sends it does on a GPU.

    Megatron's interleaved schedule gives another memory to the tensors that a pipeline stage has sent
    (`deallocate_pipeline_outputs`) while gloo still waits for the receiver. gloo holds the tensor, not its memory,
    and would then send whatever has been written there since. An alias holds the memory.
    """

    def send(original: Any, group: Any, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return original(group, [tensor.detach() for tensor in tensors], *args, **kwargs)

    wrap(dist.ProcessGroup, "send", send)
    return "torch.distributed: what is being sent keeps its memory"


# ------------------------------------------------------------------------------------- compilers, environment


def hide_cuda_packages() -> str:
    """Packages that need a GPU are not found from now on, so that Megatron takes what it has in their place."""
    loaded = [name for name in sys.modules if name.partition(".")[0] in _CUDA_PACKAGES]
    taken = [name for name in loaded if sys.modules[name] is not None and name in _CUDA_PACKAGES]
    if taken and "megatron.core.optimizer" in sys.modules:
        raise RuntimeError(
            f"burst_plugin.megatron.cpu.enable(): Megatron-core has been imported beside {', '.join(taken)}, and has "
            "taken optimizers from there that need a GPU. Call enable() before megatron.core is imported."
        )
    sys.modules.update(dict.fromkeys([*_CUDA_PACKAGES, *loaded]))  # type: ignore[arg-type]
    return f"imports: {', '.join(_CUDA_PACKAGES)} are not found"


def _set_environment() -> str:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    return "environment: TORCHDYNAMO_DISABLE=1, CUDA_DEVICE_MAX_CONNECTIONS=1 unless set"


def _stop_compilers() -> str:
    """Turn torch.compile off for code decorated from now on and, where torch can, for earlier code too."""
    importlib.import_module("torch._dynamo")  # looks at torch.cuda's real classes while it loads
    set_stance = getattr(torch.compiler, "set_stance", None)
    if set_stance is not None:  # torch >= 2.6
        set_stance("force_eager")
    return "torch.compile: off"
