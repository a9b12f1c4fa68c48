"""What a plan says to a run: the options of `Strategy` that it sets, by name, and degrees in words."""

from __future__ import annotations

from burst_plugin.planning.model_shape import ModelShape
from burst_plugin.planning.setting import Setting

__all__ = ["layout_in_words", "strategy_options"]


def strategy_options(model: ModelShape, setting: Setting) -> dict[str, object]:
    """Return the options of `Strategy` that differ from their defaults, in the order of the page of options."""
    found: dict[str, object] = {}
    if setting.ulysses > 1:
        found["ulysses_degree"] = setting.ulysses
    if setting.parts > 1:
        found["parts"] = setting.parts
    if setting.keep:
        found["keep_attention"] = "all" if setting.keep == 1.0 else setting.keep
    if setting.loss_chunk:
        found["loss_chunk"] = setting.loss_chunk
    if setting.mlp_chunk:
        found["mlp_chunk"] = setting.mlp_chunk
    if setting.head_chunks > 1:
        found["head_chunk"] = model.heads // setting.head_chunks
    if setting.offload:
        found["offload"] = True
    return found


def layout_in_words(setting: Setting) -> str:
    """Return how a model and a sequence are cut."""
    cut = f"TP {setting.tensor} x CP {setting.context} x PP {setting.pipeline} x DP {setting.data}"
    nodes = setting.context // setting.inner
    if nodes > 1:
        cut += f", CP over {nodes} nodes of {setting.inner}"
    if setting.ulysses > 1:
        cut += f", of which {setting.ulysses} exchange heads"
    return cut
