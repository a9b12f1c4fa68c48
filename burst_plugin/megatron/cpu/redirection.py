"""CUDA redirected to the CPU for a whole process: tensors, generators, messages and compilers."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from burst_plugin.frameworks.wrapping import bind, wrap
from burst_plugin.megatron.cpu.fake_cuda import replace_cuda
from burst_plugin.megatron.cpu.mixer_kernels import stand_in_for_packages

_REPORT = "_burst_plugin_cpu_report"  # kept on torch.cuda, beside what it reports
_CPU = torch.device("cpu")
# Where installed, Megatron takes its optimizers and norms from these; they launch CUDA kernels on any tensor.
_CUDA_PACKAGES = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C", "fused_weight_gradient_mlp_cuda")


def enable(*, force: bool = False) -> list[str]:
    """Redirect CUDA to the CPU for this process, so that Megatron-core runs with gloo.

    A second call changes nothing and returns the same lines.

    Args:
        force: go on even if this machine has a usable GPU, which then stays unused.

    Returns:
        One line of plain English for each kind of redirection.

    Raises:
        RuntimeError: this machine has a usable GPU and `force` is false; or Megatron-core has been imported already
            and has taken optimizers from Transformer Engine or Apex, which need one.
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
    lines += replace_cuda()
    _keep_redirecting_in_backward()
    contextlib.ExitStack().enter_context(_CudaToCpu())  # for good: nothing closes the stack
    wrap(threading.Thread, "run", _redirected)  # torch keeps its function modes per thread
    wrap(dist, "init_process_group", _refuse_nccl)
    lines.append("tensors: device cuda means cpu; cuda(), pin_memory(), record_stream() do nothing")
    lines.append("tensors: type() answers torch.cuda.*")
    vars(torch)["Generator"] = _Generator
    lines.append("generators: those of device cuda are the CPU's")
    lines.append(_send_as_from_a_gpu())
    setattr(torch.cuda, _REPORT, lines)
    return list(lines)


def is_enabled() -> bool:
    """Return whether `enable()` has run in this process."""
    return hasattr(torch.cuda, _REPORT)


def prepare(directory: Path) -> list[str]:
    """Run `enable()`, and prepare Megatron's training scripts if `directory` is in a Megatron-LM checkout.

    directory: where the script that will run is: in a checkout its root, or a folder in the root such as tools/.

    Returns:
        A line of plain English for each change.
    """
    from burst_plugin.megatron.cpu import scripts

    for checkout in (directory, directory.parent):  # scripts are in its root, or in tools/
        if (checkout / "megatron" / "training").is_dir():
            return [*enable(), *scripts.prepare_training_scripts(checkout)]
    return enable()


# ---------------------------------------------------------------------------------------------------- tensors


class _CudaToCpu(TorchFunctionMode):
    """Passes the CPU to every torch function that is given a CUDA device."""

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


def _on_cpu(value: Any, *, index: bool) -> Any:
    """Return the CPU if `value` is a CUDA device (a bare number counts as one if `index`), else `value`."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return _CPU if value == "cuda" or value.startswith("cuda:") else value
    if index and isinstance(value, int) and not isinstance(value, bool):
        return _CPU
    return value


def _redirected(original: Any, thread: threading.Thread) -> None:
    with _CudaToCpu():
        original(thread)


def _refuse_nccl(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to make a process group of GPUs, which a script may do by habit."""
    backend = bind(original, *args, **kwargs).arguments.get("backend")
    if isinstance(backend, str) and "nccl" in backend:
        raise ValueError(f"init_process_group({backend!r}) needs GPUs, which --cpu hides; write 'gloo'")
    return original(*args, **kwargs)


class _AnyGenerator(type):
    """Takes all of torch's generators for instances, as if their class had not been replaced."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class _Generator(metaclass=_AnyGenerator):
    """Replaces `torch.Generator`, which Megatron's text generation samples by: function modes do not see classes."""

    def __new__(cls, device: Any = _CPU) -> Any:
        return torch._C.Generator(device=_on_cpu(device, index=True))


def _keep_redirecting_in_backward() -> None:
    """Keep the mode on in backward passes.

    torch turns a function mode off while a function that it handles runs, and the backward pass is such a function.
    Without this, forwards that are recomputed in a backward pass would ask for CUDA again.
    """
    run_backward = vars(torch.autograd)["_engine_run_backward"]

    @functools.wraps(run_backward)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        with _CudaToCpu():
            return run_backward(*args, **kwargs)

    vars(torch.autograd)["_engine_run_backward"] = redirected


def _tensor_type(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Replace `Tensor.type`: Megatron's optimizers take only tensors of a type called torch.cuda.*Tensor."""
    if dtype is None:
        return tensor.type().replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return tensor.type(dtype, non_blocking, **kwargs)


# -------------------------------------------------------------------------------------------------- messages


def _send_as_from_a_gpu() -> str:
    """Send messages as from a GPU.

    Megatron's interleaved schedule replaces the memory of tensors that a pipeline stage has sent
    (`deallocate_pipeline_outputs`) while gloo still waits for the receiver. gloo holds the tensor, not its memory,
    and would then send whatever has been written there since. An alias holds the memory.

    The sizes of what experts exchange become arrays where Megatron moves them off the GPU. Here they are on the CPU
    and stay tensors, which torch does not take as sizes.
    """

    def send(original: Any, group: Any, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return original(group, [tensor.detach() for tensor in tensors], *args, **kwargs)

    def all_to_all(original: Any, *args: Any, **kwargs: Any) -> Any:
        call = bind(original, *args, **kwargs)
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(call.arguments.get(name), torch.Tensor):
                call.arguments[name] = call.arguments[name].tolist()
        return original(*call.args, **call.kwargs)

    wrap(dist.ProcessGroup, "send", send)
    wrap(dist, "all_to_all_single", all_to_all)
    return "torch.distributed: what is being sent keeps its memory; sizes of parts that are sent may be tensors"


# ------------------------------------------------------------------------------------- compilers, environment


def hide_cuda_packages() -> str:
    """Hide packages that need a GPU from imports, so that Megatron uses its own code instead; return a line on it.

    Packages with kernels of mixers, for which Megatron has no code of its own, get definitions in PyTorch. Raises
    RuntimeError if Megatron-core has been imported already, and has taken optimizers from a package to be hidden.
    """
    loaded = [name for name in sys.modules if name.partition(".")[0] in _CUDA_PACKAGES]
    taken = [name for name in loaded if sys.modules[name] is not None and name in _CUDA_PACKAGES]
    if taken and "megatron.core.optimizer" in sys.modules:
        raise RuntimeError(
            f"burst_plugin.megatron.cpu.enable(): Megatron-core has been imported beside {', '.join(taken)}, and has "
            "taken optimizers from there that need a GPU. Call enable() before megatron.core is imported."
        )
    sys.modules.update(dict.fromkeys([*_CUDA_PACKAGES, *loaded]))  # type: ignore[arg-type]
    return f"imports: {', '.join(_CUDA_PACKAGES)} are not found; {stand_in_for_packages()}"


def _set_environment() -> str:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    return "environment: TORCHDYNAMO_DISABLE=1, CUDA_DEVICE_MAX_CONNECTIONS=1 unless set"


def _stop_compilers() -> str:
    """Turn torch.compile off, also for functions that are compiled already."""
    importlib.import_module("torch._dynamo")  # reads torch.cuda's real classes while it loads
    torch.compiler.set_stance("force_eager")
    return "torch.compile: off"
