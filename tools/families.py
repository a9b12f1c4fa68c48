"""Say which model families of the installed transformers run on a ring, and why the others do not.

python -m tools.families                # write docs/families.md, in about a minute
python -m tools.families llama qwen3_vl # only print the rows of these
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

from burst_plugin.huggingface.media.families import EXAMINED, PLURALS, shared_by
from burst_plugin.huggingface.models import has_own_loss, problems
from burst_plugin.huggingface.text_only import text_part

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
NOT_BUILT = "unknown: cannot be built from its defaults"
_HEADS = (
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "CAUSAL_LM",
)  # the first one that a family has


def families() -> dict[str, str]:
    """Return the names of classes that generate text, by family."""
    found: dict[str, str] = {}
    for head in _HEADS:
        for family, name in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            found.setdefault(family, name)
    return dict(sorted(found.items()))


def verdict(family: str, name: str) -> str:
    """Return whether a family runs on a ring, or the first reason why not; of its default configuration."""
    try:
        config = transformers.CONFIG_MAPPING[family]()
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
    except Exception:  # of any kind: what defaults lack is found wherever it is needed
        examined = [PLURALS[each] for each in EXAMINED.get(family, ())]
        return f"{NOT_BUILT}; a tiny model runs with {' and '.join(examined)}" if examined else NOT_BUILT
    reasons = problems(model)
    if reasons:
        return "no: " + reasons[0].partition("cannot run on a ring: ")[2]
    told = ["yes"]
    if text_part(config):
        told.append(_with_media(model))
    if has_own_loss(model):
        told.append("on a loss of your own")
    return ", ".join(told)


def _with_media(model: torch.nn.Module) -> str:
    """Return which of images, video and audio a model may have on a ring, and why not the others."""
    shared, reasons = shared_by(model)
    names = [PLURALS[each] for each in shared]
    told = f"with {' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}" if names else "on text alone"
    return f"{told} ({'; '.join(reasons)})" if reasons else told


def rows(asked: Iterable[str]) -> list[str]:
    """Return the lines of a Markdown table for the families that are asked for."""
    known = families()
    return [f"| {family} | {known[family]} | {verdict(family, known[family])} |" for family in asked]


_PAGE = """# Model families of transformers

<!-- Written by `python -m tools.families`. -->

{accepted} families that generate text run on a ring, of the {all} of transformers {release}. Each is judged by its
default configuration, as `burst_plugin.huggingface.prepare(model)` judges a model; other layers or another rotary
embedding may change the verdict. {unknown} cannot be built from their defaults. {images} run with images
and {audio} with audio: losses and gradients of tiny models are those of one rank.

- "On text alone": images, audio and video are refused.
- "On a loss of your own": labels are refused; compute a loss from logits.
- "No": the first reason is given.

| family | class | runs on a ring |
| --- | --- | --- |
{table}
"""


def page(lines: Sequence[str]) -> str:
    """Return the whole page, with the lines of its table."""
    return _PAGE.format(
        accepted=sum("| yes" in line for line in lines),
        all=len(lines),
        images=sum(" with images" in line for line in lines),
        audio=sum("audio" in line.partition(" with ")[2].partition("(")[0] for line in lines),
        release=transformers.__version__,
        unknown=sum(NOT_BUILT in line for line in lines),
        table="\n".join(lines),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help="a family, such as llama; without any: all of them")
    names = parser.parse_args().family
    unknown = sorted(set(names) - families().keys())
    if unknown:
        parser.error(f"transformers has no {', '.join(unknown)} with a head that generates text")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if names:
        print("\n".join(rows(names)))
    else:
        PAGE.write_text(page(rows(families())))
