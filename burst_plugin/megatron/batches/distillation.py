"""Offline distillation (`--logits-save-dir`, `--logits-load-dir`): a teacher's files say which tokens ranks held.

Megatron names these files by context-parallel and data-parallel rank, a student reads their microbatches in order,
and Megatron compares a hash of the options that decide the global batches. Beside that hash the files get the options
that decide which tokens a rank holds:

    {"context_parallel_size": 2, "layout": "striped"}

The hash includes these options, unless ranks hold the tokens that they hold in Megatron. So files can be exchanged
with Megatron without this package where ranks hold the same tokens, and are refused elsewhere.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from functools import partial
from typing import Any

from burst_plugin.frameworks.wrapping import bind, wrap, wrap_everywhere
from burst_plugin.megatron.batches.even_microbatches import evens_microbatches
from burst_plugin.megatron.batches.layouts import MEGATRONS_OWN
from burst_plugin.megatron.flags.arguments import PACKS, RESETS, parsed_arguments
from burst_plugin.megatron.registry import Registry
from burst_plugin.strategy import AUTO

_FLAGS = ("logits_save_dir", "logits_load_dir")
_STAMP, _MARK = "burst_plugin", "_burst_plugin_stamps"
# What the layout "auto" depends on, besides documents; and what even microbatches do.
_OF_AUTO = ("schedule", "forward", "backward", "ulysses_degree", "ulysses_placement", "mesh_degree")
_OF_EVEN = ("data_parallel_size", "micro_batch_size", "global_batch_size", "rampup_batch_size")


def stamp_logits(registry: Registry) -> None:
    """Have a teacher's files of logits record which tokens ranks held, and a student check it; once per process.

    It wraps Megatron's functions that hash and verify these files: a student raises ValueError for files of a teacher
    whose ranks held other tokens. Nothing changes unless `--logits-save-dir` or `--logits-load-dir` was parsed.

    registry: the rings, whose layout decides which tokens a rank holds.
    """
    args = parsed_arguments()
    if not any(getattr(args, name, None) for name in _FLAGS):
        return
    files = importlib.import_module("megatron.training.distillation.utils_logits")
    if not hasattr(files.compute_dataset_hash, _MARK):
        wrap_everywhere(files, "compute_dataset_hash", partial(_hash, registry))
        setattr(files.compute_dataset_hash, _MARK, None)
        wrap(files, "_verify_logprobs_metadata", partial(_verify, registry))


def _hash(registry: Registry, original: Any) -> tuple[str, dict[str, Any]]:
    """Return Megatron's hash and identifiers, with the options that decide which tokens ranks hold."""
    value, identifiers = original()
    stamp = _stamp(registry)
    if not _is_megatrons_own(stamp):
        value = hashlib.md5(json.dumps([value, stamp]).encode(), usedforsecurity=False).hexdigest()
    return value, {**identifiers, _STAMP: stamp}


def _verify(registry: Registry, original: Any, *args: Any, **kwargs: Any) -> None:
    """Compare hashes as Megatron does. Raise ValueError first if ranks of the teacher held other tokens."""
    arguments = bind(original, *args, **kwargs).arguments
    if arguments["expected_hash"] is not None:  # None where files are read to look at them
        saved = json.loads(arguments["data"]).get("identifiers", {}).get(_STAMP)
        _compare(saved, _stamp(registry), arguments["tar_path"])
    original(*args, **kwargs)


def _compare(saved: dict[str, Any] | None, stamp: dict[str, Any], file: str) -> None:
    """Raise ValueError for a file with another stamp, or with none where ranks hold other tokens than in Megatron."""
    if saved is None and not _is_megatrons_own(stamp):
        raise ValueError(
            f"{file} (--logits-load-dir) does not say which tokens ranks of the teacher held, so these are those of "
            f"Megatron itself; ranks of the student hold others: {_written(stamp)}. Give the student --burst-layout "
            f"{MEGATRONS_OWN}, without --burst-even-microbatches, or save the teacher's logits with its flags"
        )
    if saved is not None and saved != stamp:
        raise ValueError(
            f"{file} (--logits-load-dir) is of a teacher whose ranks held other tokens: {_written(saved)}; those of "
            f"the student have {_written(stamp)}. Give the student the teacher's flags, or save the teacher's logits "
            "with the student's"
        )


def _stamp(registry: Registry) -> dict[str, Any]:
    """Return the options that decide which tokens a rank holds, in types that JSON has."""
    args = parsed_arguments()
    ranks = args.context_parallel_size
    layout = registry.layout if ranks > 1 else MEGATRONS_OWN
    stamp: dict[str, Any] = {"context_parallel_size": ranks, "layout": layout}
    if layout == AUTO:
        stamp["documents"] = [name for name in (RESETS, PACKS, "sft") if getattr(args, name, False)]
        for ring in registry.rings()[:1]:
            stamp["topology"] = str(ring.topology)
            stamp |= {name: getattr(ring.strategy, name) for name in _OF_AUTO}
    if evens_microbatches():
        stamp["even_microbatches"] = {name: getattr(args, name, None) for name in _OF_EVEN}
    return json.loads(json.dumps(stamp))  # type: ignore[no-any-return]


def _is_megatrons_own(stamp: dict[str, Any]) -> bool:
    return stamp["layout"] == MEGATRONS_OWN and "even_microbatches" not in stamp


def _written(stamp: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in stamp.items())
