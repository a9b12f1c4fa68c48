"""Walks over a model's modules: once per block, anew in the next one, and few in a forward of a prepared model."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers

from burst_plugin import ContextParallel, shard_batch
from burst_plugin.huggingface import prepare, walks
from burst_plugin.huggingface.text_only import named_text_modules, text_modules
from tests.support.deepspeed_run import llama

pytestmark = pytest.mark.huggingface


def _names(model: torch.nn.Module) -> set[str]:
    return {name for name, _ in named_text_modules(model)}


def test_a_block_walks_once_and_the_next_one_sees_what_has_changed() -> None:
    model = transformers.LlamaForCausalLM(llama(num_hidden_layers=1))
    with walks.walking_once():
        before = _names(model)
        model.added = torch.nn.Linear(1, 1)
        with walks.walking_once():
            assert _names(model) == before
        assert _names(model) == before
    assert _names(model) == before | {"added"}
    with pytest.raises(AttributeError), walks.walking_once():
        named_text_modules(None)
    del model.added
    assert _names(model) == before
    assert list(text_modules(model)) == list(model.modules())


def test_a_block_of_another_thread_shares_nothing() -> None:
    model = transformers.LlamaForCausalLM(llama(num_hidden_layers=1))
    with walks.walking_once():
        before = _names(model)
        model.added = torch.nn.Linear(1, 1)
        seen: list[set[str]] = []
        thread = threading.Thread(target=lambda: seen.append(_names(model)))
        thread.start()
        thread.join()
    assert seen == [before | {"added"}]


def test_a_forward_walks_over_its_model_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks alone would walk a dozen times; transformers walks once or twice."""
    model = prepare(transformers.LlamaForCausalLM(llama(num_hidden_layers=1))).train()
    local = shard_batch({"input_ids": torch.arange(8)[None]}, ContextParallel())
    model(**local)
    walked, named_modules = [], torch.nn.Module.named_modules

    def counted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is model and not kwargs.get("prefix") and not any(args[1:2]):
            walked.append(module)
        return named_modules(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "named_modules", counted)
    model(**local)
    assert len(walked) <= 3


def test_only_what_reentrant_checkpoints_lose_has_a_forward_look_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters on all layers that walk took more than half of the checks before a forward."""
    model = prepare(transformers.LlamaForCausalLM(llama(num_hidden_layers=1))).train()
    local = shard_batch({"input_ids": torch.arange(8)[None]}, ContextParallel())
    monkeypatch.delattr("burst_plugin.huggingface.forward_checks.text_modules")
    model(**local)
    model.config.num_kv_shared_layers = 1
    with pytest.raises(NameError, match="text_modules"):
        model(**local)
