"""Offline distillation: files of a teacher whose ranks held other tokens are refused, by what decides that."""

from __future__ import annotations

import argparse
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from burst_plugin import Strategy, Topology
from burst_plugin.megatron.batches.distillation import stamp_logits
from burst_plugin.megatron.flags.arguments import add_arguments
from burst_plugin.megatron.registry import Registry

pytestmark = pytest.mark.megatron

FILES = "megatron.training.distillation.utils_logits"
FILE = "logits/cp0_dp0__100.tar"
STRIPED = {"burst_layout": "striped"}
EVEN = {"burst_even_microbatches": True}
AUTO = {"burst_layout": "auto", "reset_attention_mask": True}


class _Files(ModuleType):
    """Stand in for the module of Megatron 0.19 and later: its hash, and how it compares that of a file."""

    @staticmethod
    def compute_dataset_hash() -> tuple[str, dict[str, Any]]:
        return "1234", {"seed": 1}

    @staticmethod
    def _verify_logprobs_metadata(data: bytes, *, tar_path: str, expected_hash: str | None) -> None:
        if expected_hash is not None and json.loads(data).get("hash") != expected_hash:
            raise RuntimeError("Data does not align!")


class _Run:
    """A teacher or student of some flags, with the plugin or without."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        flags: dict[str, Any],
        *,
        has_plugin: bool = True,
        topology: Topology | None = None,
    ) -> None:
        args = add_arguments(argparse.ArgumentParser()).parse_args([])
        usual = {"context_parallel_size": 2, "cp_comm_type": ["burst"], "logits_save_dir": "logits"}
        sizes = {"data_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 8}
        vars(args).update({**usual, **sizes, **flags})
        parsed = argparse.Namespace(_GLOBAL_ARGS=args)
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", parsed)  # type: ignore[arg-type]
        self._files = _Files(FILES)
        monkeypatch.setitem(sys.modules, FILES, self._files)
        ring = SimpleNamespace(topology=topology or Topology(1, 2), strategy=Strategy())
        registry = Registry(None)
        monkeypatch.setattr(registry, "rings", lambda: [ring])
        if has_plugin:
            stamp_logits(registry)

    def save(self) -> bytes:
        """Return what Megatron writes into every file."""
        value, identifiers = self._files.compute_dataset_hash()
        return json.dumps({"hash": value, "identifiers": identifiers}).encode()

    def load(self, data: bytes) -> None:
        """Compare what a file says."""
        value, _ = self._files.compute_dataset_hash()
        self._files._verify_logprobs_metadata(data, tar_path=FILE, expected_hash=value)


@pytest.mark.parametrize("flags", [{}, STRIPED, EVEN, {**STRIPED, **EVEN}, AUTO], ids=str)
def test_a_student_reads_files_of_a_teacher_with_the_same_flags(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = _Run(monkeypatch, flags).save()
    _Run(monkeypatch, {**flags, "logits_save_dir": None, "logits_load_dir": "logits"}).load(saved)


@pytest.mark.parametrize("context_parallel_size", [1, 2])
def test_in_zigzag_files_go_from_and_to_megatron_itself(
    context_parallel_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"context_parallel_size": context_parallel_size}
    for has_plugin in (False, True):
        saved = _Run(monkeypatch, flags, has_plugin=has_plugin).save()
        _Run(monkeypatch, flags, has_plugin=not has_plugin).load(saved)


@pytest.mark.parametrize(
    ("teacher", "student", "said"),
    [
        ({}, STRIPED, "held other tokens: context_parallel_size=2, layout='zigzag'; those of the student have "
         "context_parallel_size=2, layout='striped'"),
        (STRIPED, {}, "held other tokens: context_parallel_size=2, layout='striped'"),
        ({}, EVEN, "layout='zigzag', even_microbatches={'data_parallel_size': 2"),
        (EVEN, {**EVEN, "data_parallel_size": 4}, "even_microbatches={'data_parallel_size': 4"),
        ({}, {"context_parallel_size": 4}, "those of the student have context_parallel_size=4"),
        (AUTO, {**AUTO, "reset_attention_mask": False}, "documents=[]"),
    ],
)  # fmt: skip
def test_files_of_a_teacher_whose_ranks_held_other_tokens_are_refused(
    teacher: dict[str, Any], student: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = _Run(monkeypatch, teacher).save()
    with pytest.raises(ValueError, match="is of a teacher whose ranks held other tokens") as error:
        _Run(monkeypatch, student).load(saved)
    assert str(error.value).startswith(FILE)
    assert said in str(error.value)
    assert "Give the student the teacher's flags" in str(error.value)


def test_where_layouts_are_chosen_by_the_cluster_it_has_to_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = _Run(monkeypatch, AUTO, topology=Topology(2, 1)).save()
    with pytest.raises(ValueError, match="topology='1x2"):
        _Run(monkeypatch, AUTO).load(saved)


@pytest.mark.parametrize("student", [STRIPED, EVEN, AUTO], ids=str)
def test_files_without_a_stamp_are_for_students_in_zigzag(
    student: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = _Run(monkeypatch, {}, has_plugin=False).save()
    with pytest.raises(ValueError, match="does not say which tokens ranks of the teacher held") as error:
        _Run(monkeypatch, student).load(saved)
    assert "Give the student --burst-layout zigzag, without --burst-even-microbatches" in str(error.value)


@pytest.mark.parametrize("teacher", [STRIPED, EVEN, AUTO], ids=str)
def test_megatron_itself_refuses_files_of_another_layout(
    teacher: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = _Run(monkeypatch, teacher).save()
    with pytest.raises(RuntimeError, match="does not align"):
        _Run(monkeypatch, {}, has_plugin=False).load(saved)


def test_nothing_is_wrapped_unless_logits_are_saved_or_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, {"logits_save_dir": None})
    assert run._files.compute_dataset_hash is _Files.compute_dataset_hash
