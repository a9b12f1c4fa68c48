"""Imports DeepSpeed, transformers, and what they import when they are used, once, before ranks are forked."""

import contextlib
import importlib
import warnings

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
quiet_ranks = pytest.importorskip("tests.support.deepspeed_run").quiet_ranks
warnings.filterwarnings("ignore", category=FutureWarning)
_ENGINES = ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.sequence_parallel.ulysses_sp")
for name in ("accelerate", "datasets", "peft", "transformers.trainer", "torch._inductor.compile_fx", *_ENGINES):
    with contextlib.suppress(ImportError):  # else every rank of every test imports them, for 3 s
        importlib.import_module(name)
