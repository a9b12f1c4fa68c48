"""The page that says which model families run on a ring."""

from __future__ import annotations

import pytest
import transformers

from burst_plugin.huggingface.models import problems
from tools import families
from tools.families import PAGE

pytestmark = pytest.mark.huggingface

AS_PAGE = f"of transformers {transformers.__version__}." in PAGE.read_text()


def test_half_of_all_families_run() -> None:
    lines = PAGE.read_text().splitlines()
    assert sum("| yes" in line for line in lines) >= 150
    assert sum(families.NOT_BUILT in line for line in lines) <= 30
    assert sum(" with images" in line for line in lines) >= 55


@pytest.mark.skipif(not AS_PAGE, reason="the page is about another release of transformers")
def test_the_page_has_every_family_of_its_release_as_it_is() -> None:
    lines = PAGE.read_text().splitlines()
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    assert names[1:] == ["---", *families.families()]
    asked = ["bart", "chameleon", "gpt2", "llama", "mamba2", "musicflamingo", "qwen2_5_vl", "qwen2_audio", "voxtral"]
    assert [row for row in families.rows(asked) if row not in lines] == [], "run `python -m tools.families`"


def test_a_family_is_judged_by_the_first_reason_in_full() -> None:
    """Which says what to do, and does not name the class again."""
    model = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(n_embd=16, n_layer=1, n_head=2))
    first = problems(model)[0]
    verdict = families.verdict("openai-gpt", "OpenAIGPTLMHeadModel")
    assert verdict.startswith("no: ")
    assert first.endswith(verdict.removeprefix("no: "))
    assert families.verdict("llama", "LlamaForCausalLM") == "yes"
    assert families.verdict("bart", "BartForCausalLM") == "yes, on a loss of your own"
    assert families.verdict("llava", "LlavaForConditionalGeneration") == "yes, with images"
    assert families.verdict("mllama", "MllamaForConditionalGeneration") == "yes, on text alone"
