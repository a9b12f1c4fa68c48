"""Stand-ins for functions and classes of `torch.cuda`, answered by the CPU, for `burst_plugin.megatron.cpu`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch


def replace_cuda() -> list[str]:
    """Replace functions and classes of `torch.cuda` for good, by stand-ins that run without a GPU.

    Functions answer as for one idle device or do nothing, generators are the CPU's, streams and events are always
    done. Returns a line of text for each of these kinds.
    """
    lines = []
    for meaning, replacements in _replacements().items():
        _replace(replacements)
        lines.append(f"torch.cuda: {', '.join(sorted(replacements))} {meaning}")
    torch.accelerator.current_accelerator = _answer(None)  # otherwise CUDA builds of torch would ask the driver
    lines.append("torch.accelerator: there is none")
    _run_lazy_calls_at_once()
    return lines


class _CudaStream:
    """A stream whose work is always done already."""

    cuda_stream = 0
    device = torch.device("cpu")

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

    def record_event(self, event: _CudaEvent | None = None) -> _CudaEvent:
        event = event or _CudaEvent()
        event.record()
        return event

    def __enter__(self) -> _CudaStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class _CudaEvent:
    """An event that happens when it is recorded, at the time of the host."""

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

    def elapsed_time(self, end_event: _CudaEvent) -> float:
        """Return the milliseconds from this event to `end_event`, like torch.cuda.Event."""
        return (end_event._recorded_s - self._recorded_s) * 1e3


def _answer(value: Any) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _device_count() -> int:
    """Return the number of ranks on this machine, by the launcher's LOCAL_WORLD_SIZE: a device for each."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextlib.contextmanager
def _range(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _replacements() -> dict[str, dict[str, Any]]:
    """Return the replacements of names in torch.cuda: {effect: {name: replacement}}."""
    properties = types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=0, multi_processor_count=os.cpu_count() or 1
    )
    generator = torch.default_generator
    stream = _CudaStream()
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
    streams: dict[str, Any] = {"Stream": _CudaStream, "ExternalStream": _CudaStream, "Event": _CudaEvent}
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
    """Seed generators at once: torch.cuda would put it off until CUDA starts, which it never does here."""

    def call(function: Callable[[], Any], **kwargs: Any) -> None:
        function()

    for module in (torch.cuda, sys.modules.get("megatron.core.tensor_parallel.random")):
        if module is not None:
            vars(module).update(_lazy_call=call, _lazy_init=_answer(None))
    # Both generators of the tracker are now one, so that its warning about this means nothing.
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
