"""Flags that `burst plan --emit` writes for a model: Megatron's model computes what transformers' does."""

from __future__ import annotations

from pathlib import Path

import pytest

from burst_plugin.megatron import cpu, install
from burst_plugin.megatron.flags.model_flags import model_flags
from burst_plugin.megatron.planning import files, space
from burst_plugin.megatron.releases import target_version
from burst_plugin.training.setting import Setting
from tests.support.model_flags import BEFORE_0_19, LACKS, TOKENS, built_by_megatron, cases, gap
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

# Flags without which another model is built that has all of the weights, and one that is made small to show each.
SAY_MORE = {
    "--rotary-base": "llama3_8b",
    "--use-rope-scaling": "llama_3_1",
    "--norm-epsilon": "qwen2",
    "--window-size": "mistral",
    "--window-attn-skip-freq": "qwen2_with_windows",
    "--moe-router-pre-softmax": "qwen2_moe",
    "--no-bias-gelu-fusion": "gpt_oss_without_yarn",
    "--glu-linear-offset": "gpt_oss_without_yarn",
    "--activation-func-clamp-value": "gpt_oss_without_yarn",
}


def without(flag: str, words: list[str]) -> list[str]:
    """Return `words` without a flag and its value."""
    start = words.index(flag)
    end = start + 1
    while end < len(words) and not words[end].startswith("--"):
        end += 1
    return words[:start] + words[end:]


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """A stand-in parses and builds; tests/megatron_lm/test_model_flags_in_scripts.py lets the scripts do it."""
    version = target_version()
    refused = {*LACKS, *(BEFORE_0_19 if version < (0, 19, 0) else ())}

    def compare(rank: int) -> tuple[dict[str, float], dict[str, float]]:
        cpu.enable(force=True)
        install()  # which also repairs what keeps experts from running without Transformer Engine
        models = {name: case for name, case in cases(tmp_path).items() if name not in refused}
        words = {name: " ".join(model_flags(model, 1, version)).split() for name, (model, _) in models.items()}
        gaps = {name: gap(built_by_megatron(words[name]), config) for name, (_, config) in models.items()}
        spoiled = {
            flag: gap(built_by_megatron(without(flag, words[name])), models[name][1])
            for flag, name in SAY_MORE.items()
        }
        return gaps, spoiled

    ((gaps, spoiled),) = run_ranks(compare, 1, timeout_s=120)
    assert len(gaps) >= 18
    assert {name: found for name, found in gaps.items() if not found < 1e-4} == {}
    assert {flag: found for flag, found in spoiled.items() if not 1e-2 < found < 1e3} == {}, "these have no effect"


def test_what_megatron_cannot_express_is_refused_by_name(tmp_path: Path) -> None:
    for name, (model, _) in cases(tmp_path).items():
        lacks = LACKS.get(name, ())
        for version in ((0, 16, 1), (0, 18, 2), (0, 19, 0), (0, 20, 0)):
            missing = lacks or ((BEFORE_0_19[name],) if version < (0, 19, 0) and name in BEFORE_0_19 else ())
            if not missing:
                assert model_flags(model, 1, version)
                continue
            with pytest.raises(
                ValueError, match=f"Megatron {'.'.join(map(str, version))}, which has none for"
            ) as error:
                model_flags(model, 1, version)
            for text in missing:
                assert text in str(error.value)


def test_experts_are_computed_again_by_their_own_module(tmp_path: Path) -> None:
    """Megatron's "mlp" is a dense one."""
    models = cases(tmp_path)
    setting = Setting(tokens=TOKENS, code=space(True).code, recompute="mlp")
    for name, module in (("mistral", "mlp"), ("mixtral", "moe")):
        (text,) = files(models[name][0], setting).values()
        assert f"--recompute-granularity selective --recompute-modules {module}\n" in text
