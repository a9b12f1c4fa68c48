"""A training plan as text: the chosen setting and why, its memory and time part by part, and the runner-up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from operator import attrgetter

from burst_plugin.strategy import AUTO
from burst_plugin.training.memory import GIB
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.recurrent_time import can_exchange_heads
from burst_plugin.training.setting import Setting, latents_sent, layout_in_words, strategy_options
from burst_plugin.training.step_time import bound_by, step_seconds
from burst_plugin.training.tower_costs import busiest_units, flops, imbalance, sent_rows_bytes
from burst_plugin.training.training_plan import Candidate, Goal, can_exchange, fits, reasons

_RECOMPUTED = {
    "none": "nothing is computed again",
    "mlp": "MLPs are computed again",
    "full": "layers are computed again",
}
_ALIKE = 1e-3  # a share of a step that counts as none
_NAMES = {
    "keep": "keep_attention",
    "head_chunks": "head_chunk",
    "offload_optimizer": "optimizer on the host",
    "ulysses": "ulysses_degree",
}


def report(goal: Goal, title: str, best_first: list[Candidate], *, is_given: bool = False) -> Iterator[str]:
    """Yield the lines of a report on the fastest plan: its options and why, its memory and time, and the runner-up.

    goal: the model, sequence and cluster that the plans are for. title: the name of the framework. best_first: the
    plans that fit, the fastest first; at least one. is_given: whether the first is a setting that a user gave, not
    found by a search, so that there is no runner-up.
    """
    best = best_first[0]
    cluster = goal.cluster
    yield (
        f"{goal.model.name} ({goal.model.parameters / 1e9:.2f} G parameters) on {goal.tokens:,} tokens, {title}, "
        f"{cluster.nodes} x {gpus_in_words(cluster.gpus_per_node)} of {cluster.gpu_gib:g} GiB: "
        f"{seconds_in_words(best.step_s)} per step, {best.tokens_per_s:.0f} tokens/s per GPU, "
        f"{best.memory.gpu_bytes / GIB:.1f} GiB{'' if fits(best.memory, cluster) else ' (does not fit)'}"
    )
    yield from _layers(goal.model)
    yield from _images(goal.model, best.setting)
    yield ""
    ways = f"{len(best_first)} ways that fit" if len(best_first) > 1 else "1 way that fits"
    yield "Given" if is_given else f"Chosen, of {ways}"
    yield from _chosen(goal, best)
    yield ""
    yield from _memory(best)
    yield ""
    if best.step_s >= 1:
        yield from _table("Seconds per step", best.seconds, best.step_s, "s")
    else:
        parts = {name: 1e3 * seconds for name, seconds in best.seconds.items()}
        yield from _table("Milliseconds per step", parts, 1e3 * best.step_s, "ms")
    yield f"  bound by {bound_by(best.seconds)}"
    if not is_given:
        yield ""
        yield from _runner_up(goal, best_first)
        yield ""
        yield (
            "PyTorch may reserve half as much memory again as tensors take, and releases it when memory is short. "
            "Against fragmentation try PYTORCH_ALLOC_CONF=expandable_segments:True"
        )


def as_dict(goal: Goal, title: str, best_first: list[Candidate]) -> dict[str, object]:
    """Return the fastest plan and the runner-up for a JSON file, with bytes, seconds and the options of `Strategy`.

    goal: the model, sequence and cluster that the plans are for. title: the name of the framework. best_first: the
    plans that fit, the fastest first; at least one.
    """

    def of(candidate: Candidate) -> dict[str, object]:
        return {
            "setting": {name: value for name, value in asdict(candidate.setting).items() if name != "code"},
            "options": strategy_options(goal.model, candidate.setting),
            "fits": fits(candidate.memory, goal.cluster),
            "gpu_bytes": candidate.memory.gpu,
            "host_bytes": candidate.memory.host,
            "seconds": candidate.seconds,
            "tokens_per_s_and_gpu": candidate.tokens_per_s,
        }

    return {
        "model": goal.model.name,
        "parameters": goal.model.parameters,
        "tokens": goal.tokens,
        "framework": title,
        "cluster": asdict(goal.cluster),
        "ways_that_fit": sum(fits(each.memory, goal.cluster) for each in best_first),
        "chosen": of(best_first[0]),
        "runner_up": next(map(of, best_first[1:]), None),
    }


def _layers(model: ModelShape) -> Iterator[str]:
    """Yield lines on the windows and kinds of layers, where layers differ."""
    if model.windowed:
        yield f"Attention: windows of {model.window:,} tokens in {model.windowed} of {model.layers} layers"
    if model.mixers:
        counts: dict[str, int] = {}
        for mixer, layers in model.mixers:
            counts[mixer.kind] = counts.get(mixer.kind, 0) + layers
        parts = [f"{kind} in {count}" for kind, count in (*counts.items(), ("attention", model.attention_layers))]
        yield f"Layers: {', '.join(parts)} of {model.layers}"


def _images(model: ModelShape, setting: Setting) -> Iterator[str]:
    """Yield lines on the images of a sequence, and on the ranks that encode them."""
    media = model.media
    if media is None:
        if isinstance(model.config.get("vision_config"), Mapping):
            yield "Text alone, without the model's tower; add --images for images in each sequence"
        return
    linear, attention = flops(media)
    tower, units = media.tower, media.units * setting.micro_batch
    yield (
        f"Images: {media.units:,} of {media.rows:,} tokens and {media.patches:,} patches, together {media.tokens:,} "
        f"tokens; {'frozen ' if media.frozen else ''}tower of {tower.parameters / 1e9:.2f} G parameters"
    )
    yield (
        f"  an image takes {(linear + attention) / 1e12:.2f} TFLOP forward, "
        f"{100 * attention / (linear + attention):.0f} % of it in the tower's attention"
    )
    yield (
        f"  the busiest rank of a ring encodes {busiest_units(media, setting):,} of {units:,}, "
        f"{imbalance(media, setting):.2f} times the mean"
    )
    yield f"  a rank sends {sent_rows_bytes(media, setting) / 2**20:.1f} MiB of features in each pass"


def seconds_in_words(seconds: float) -> str:
    """Return a time as text, such as "1.2 s" or "350 ms": in s, or below one in ms, with at least two digits."""
    number, unit = (seconds, "s") if seconds >= 0.9995 else (1e3 * seconds, "ms")
    return f"{number:.0f} {unit}" if number >= 9.95 else f"{number:.1f} {unit}"


def gpus_in_words(count: int) -> str:
    """Return a number of GPUs as text, such as "1 GPU" or "8 GPUs"."""
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _chosen(goal: Goal, best: Candidate) -> Iterator[str]:
    yield f"  {_in_words(best.setting)}"
    options, why = strategy_options(goal.model, best.setting), reasons(goal, best)
    why.pop("latents", None)  # which has a line below
    for lever, reason in why.items():
        name = _NAMES.get(lever, lever)
        value = f" = {options[name]}" if name in options and options[name] is not True else ""
        yield f"  {name + value:<26}{reason}"
    if "recurrent" in options:
        yield f"  {f'recurrent = {best.setting.recurrent}':<26}{_other_way(goal, best)}"
    if goal.model.latent is not None and best.setting.context > 1:
        yield f"  {_latents(goal, best)}"


def _other_way(goal: Goal, best: Candidate) -> str:
    """Return a text on the step with heads exchanged in place of states, or states in place of heads."""
    setting = best.setting
    if not can_exchange_heads([mixer for mixer, _ in goal.model.mixers], setting.context, setting.tensor):
        return f"{setting.context} ranks cannot share the heads of these layers"
    way, noun = ("heads", "heads") if setting.recurrent == "state" else ("state", "states")
    spent = step_seconds(goal.model, replace(setting, recurrent=way), goal.cluster)
    more_s = sum(spent.values()) - best.step_s
    return f"with {noun} a step takes {seconds_in_words(abs(more_s))} {'more' if more_s > 0 else 'less'}"


def _latents(goal: Goal, best: Candidate) -> str:
    """Return a line on the tensors sent in latent attention, and on the best alternative, or why there is none."""
    setting, model = best.setting, goal.model
    if latents_sent(model, setting) is not None:
        expanded = replace(setting, latents="expand")
        degrees = [n for n in setting.topology.ulysses_degrees if n > 1 and can_exchange(model, expanded, n)]
        others = [replace(setting, ulysses=n) for n in degrees]
        chosen, alternative = "latents sent", "heads exchanged (ulysses_degree = {})"
    else:
        others = [replace(setting, ulysses=1, parts=1, latents=AUTO)]
        chosen = "latents not sent" if setting.latents == AUTO else f"latents = {setting.latents}"
        alternative = "latents sent"
    if not others:
        return f"{chosen:<26}ranks cannot share heads"
    priced = [Candidate.of(goal, option) for option in others]
    nearest = min(priced, key=lambda option: (not fits(option.memory, goal.cluster), option.step_s))
    more_s, gib = nearest.step_s - best.step_s, nearest.memory.gpu_bytes / GIB
    difference = f"{seconds_in_words(abs(more_s))} {'more' if more_s > 0 else 'less'}"
    takes = "as long" if abs(more_s) < _ALIKE * best.step_s else difference
    needs = "" if fits(nearest.memory, goal.cluster) else f", and a GPU needs {gib:.1f} GiB"
    return f"{chosen:<26}with {alternative.format(nearest.setting.ulysses)} a step takes {takes}{needs}"


def _in_words(setting: Setting) -> str:
    return f"{layout_in_words(setting)}; ZeRO {setting.zero}; {_RECOMPUTED[setting.recompute]}"


def _memory(best: Candidate) -> Iterator[str]:
    memory = best.memory
    yield from _table("GiB per GPU", {k: v / GIB for k, v in memory.gpu.items()}, memory.gpu_bytes / GIB, "GiB")
    yield f"  at work, in the fullest moment: {memory.fullest}"
    for name, nbytes in memory.at_work.items():
        if nbytes >= 0.05 * GIB:
            yield f"    {name:<62}{nbytes / GIB:8.1f} GiB"
    yield from _table("GiB per host", {k: v / GIB for k, v in memory.host.items()}, memory.host_bytes / GIB, "GiB")


def _table(title: str, parts: Mapping[str, float], total: float, unit: str) -> Iterator[str]:
    yield title
    for name, value in parts.items():
        if value >= 0.05:
            yield f"  {name:<56}{value:8.1f} {unit}"
    yield f"  {'together':<56}{total:8.1f} {unit}"


def _runner_up(goal: Goal, best_first: list[Candidate]) -> Iterator[str]:
    differs_in = attrgetter("tensor", "context", "pipeline", "zero", "recompute", "keep")
    for candidate in best_first[1:]:
        setting = candidate.setting
        if differs_in(setting) != differs_in(best_first[0].setting):
            options = ", ".join(f"{name} = {value}" for name, value in strategy_options(goal.model, setting).items())
            yield (
                f"Runner-up: {_in_words(setting)}{'; ' if options else ''}{options}"
                f"{'; optimizer on the host' if setting.offload_optimizer else ''}: "
                f"{seconds_in_words(candidate.step_s)}, "
                f"{candidate.tokens_per_s:.0f} tokens/s per GPU, {candidate.memory.gpu_bytes / GIB:.1f} GiB"
            )
            return
    yield "No other way fits."
