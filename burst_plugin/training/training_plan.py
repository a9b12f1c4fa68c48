"""The fastest way to train a model on sequences of some length that fits: all settings, priced, the best first.

goal = Goal(model=MODELS["llama3_8b"], tokens=2**20, cluster=Cluster(), space=space)
best_first = plans_that_fit(goal)                # [Candidate(setting, memory, seconds), ...]
longest(goal)                                    # the most tokens of a sequence that fits
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from burst_plugin.planning.cluster import Cluster
from burst_plugin.strategy import AUTO
from burst_plugin.training.layer_memory import ring_shapes
from burst_plugin.training.memory import GIB, TrainingMemory, memory, surely_too_large
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.recurrent_time import can_exchange_heads
from burst_plugin.training.setting import Code, Setting, latents_sent
from burst_plugin.training.step_time import step_seconds, tokens_per_second

_LOSS_CHUNK, _MLP_CHUNK = 1024, 4096  # tokens: enough for full speed of a matrix product, and little memory
_STEP = 2**16  # tokens: how exactly the longest sequence is found
_BEYOND_REASON = 2.0  # times what another plan lacks
_ALIKE = 1.01  # plans whose times differ by less are ordered by how plain they are

LEVERS = {
    "keep": 0.0,
    "loss_chunk": 0,
    "mlp_chunk": 0,
    "offload": False,
    "offload_optimizer": False,
    "ulysses": 1,
    "parts": 1,
    "head_chunks": 1,
    "latents": AUTO,
}
"""What a plan may switch on, with the value that is off."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The settings that a framework offers: the code of its layers, and its kinds of parallelism.

    code: what its layers keep. zeros: its stages of sharding, 1 or 3, see `Setting.zero`.
    tensor, pipeline: whether it has tensor and pipeline parallelism.
    recompute: the values of `Setting.recompute` that it has.
    divides: whether a sequence has to be a multiple of twice its context-parallel ranks, times tensor-parallel ones.
    head_chunks: whether a layer's heads can run in chunks. media: whether ranks share the tower of images.
    """

    code: Code
    zeros: tuple[int, ...]
    tensor: bool
    pipeline: bool
    recompute: tuple[str, ...]
    divides: bool
    head_chunks: bool = False
    media: bool = False


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The task of a training plan: to train `model` on `cluster` with the settings in `space`.

    tokens: of each sequence. batch: sequences of a step.
    """

    model: ModelShape
    tokens: int
    cluster: Cluster
    space: Space
    batch: int = 1


@dataclass(frozen=True)
class Candidate:
    """A setting, the memory that it takes, and the seconds of a step, by part (`step_seconds`)."""

    setting: Setting
    memory: TrainingMemory
    seconds: dict[str, float]

    @classmethod
    def of(cls, goal: Goal, setting: Setting) -> Candidate:
        """Return the candidate with this setting, whether or not its memory fits."""
        return cls(
            setting, memory(goal.model, setting, goal.cluster), step_seconds(goal.model, setting, goal.cluster)
        )

    @property
    def step_s(self) -> float:
        """Return the seconds of an optimizer step, the sum of its parts."""
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        """Return how many tokens each GPU trains per second."""
        return tokens_per_second(self.setting, self.step_s)


def settings(goal: Goal) -> Iterator[Setting]:
    """Yield every setting of the goal's space for its model and cluster, whether or not it fits in memory."""
    for setting in _layouts(goal):
        degrees = [n for n in setting.topology.ulysses_degrees if n == 1 or can_exchange(goal.model, setting, n)]
        for recompute, degree in product(goal.space.recompute, degrees):
            at_degree = replace(setting, ulysses=degree)
            kv_heads = gcd(*(ring_shapes(kind, at_degree).kv_heads for kind in goal.model.attending))
            keeps = (0.0, 0.5, 1.0) if recompute == "full" else (0.0,)
            heads = ((1, 1), (4, 1), *((1, n) for n in _head_chunks(goal, setting, degree)))
            ways, sent = _recurrent_ways(goal, setting), _latent_ways(goal, setting, degree)
            switches = product(
                keeps, (0, _LOSS_CHUNK), (0, _MLP_CHUNK), (False, True), (False, True), heads, ways, sent
            )
            for keep, loss_chunk, mlp_chunk, hidden, optimizer, (parts, head_chunks), way, latents in switches:
                if len(sent) > 1 and latents == AUTO and parts > 1:  # with which keys and values are sent anyway
                    continue
                if mlp_chunk and (goal.model.has_experts or "mlp" not in goal.model.in_chunks):
                    continue
                if hidden and recompute != "full":  # else inputs of layers are a small share of what waits
                    continue
                if (parts > 1 or head_chunks > 1 or keep) and not goal.model.attends:
                    continue
                if parts > 1 and (setting.context == degree or kv_heads % parts):  # no ring, or too few heads
                    continue
                yield replace(
                    setting,
                    recompute=recompute,
                    keep=keep,
                    loss_chunk=loss_chunk,
                    mlp_chunk=mlp_chunk,
                    offload=hidden,
                    offload_optimizer=optimizer,
                    ulysses=degree,
                    parts=parts,
                    head_chunks=head_chunks,
                    recurrent=way,
                    latents=latents,
                )


def can_exchange(model: ModelShape, setting: Setting, degree: int) -> bool:
    """Return whether `degree` ranks can exchange the heads, or each chunk of them, of all layers that attend."""
    kinds = model.attending
    return bool(kinds) and all(
        kind.indexer is None and degree in ring_shapes(kind, setting).ulysses_degrees for kind in kinds
    )


def _recurrent_ways(goal: Goal, setting: Setting) -> tuple[str, ...]:
    """Return the ways to exchange for layers with a state: "state", and "heads" where ranks can share them."""
    mixers = [mixer for mixer, _ in goal.model.mixers]
    return ("state", "heads") if can_exchange_heads(mixers, setting.context, setting.tensor) else ("state",)


def _latent_ways(goal: Goal, setting: Setting, degree: int) -> tuple[str, ...]:
    """Return the values of `latents` to try: rings may send latents, or keys and values, as exchanges of heads do."""
    can_send = latents_sent(goal.model, replace(setting, ulysses=degree)) is not None
    return (AUTO, "expand") if can_send else (AUTO,)


def _layouts(goal: Goal) -> Iterator[Setting]:
    """Yield all cuts of model, sequence and batch over all GPUs, with nothing switched on."""
    gpus, per_node, model = goal.cluster.gpus, goal.cluster.gpus_per_node, goal.model
    heads = [kind.kv_heads for kind in model.attending] + [
        n for mixer, _ in model.mixers for _, n, *_ in mixer.tensors
    ]
    tensors = [n for n in _divisors(per_node) if n == 1 or (goal.space.tensor and not any(h % n for h in heads))]
    pipelines = [n for n in (1, 2, 4) if n == 1 or (goal.space.pipeline and model.layers % n == 0)]
    for tensor, pipeline, zero in product(tensors, pipelines, goal.space.zeros):
        for context in _divisors(gpus // (tensor * pipeline)):
            data = gpus // (tensor * pipeline * context)
            inner = min(context, per_node // tensor)
            if tensor * pipeline * context * data != gpus or goal.batch % data or context % inner:
                continue
            if goal.space.divides and goal.tokens % (2 * context * tensor):
                continue
            yield Setting(
                tokens=goal.tokens,
                code=goal.space.code,
                tensor=tensor,
                context=context,
                pipeline=pipeline,
                data=data,
                inner=inner,
                batch=goal.batch,
                zero=zero,
            )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _head_chunks(goal: Goal, setting: Setting, degree: int) -> list[int]:
    """Return into how many chunks of whole groups heads can be cut, so that `degree` ranks can exchange each."""
    if not goal.space.head_chunks or "heads" not in goal.model.in_chunks:
        return []
    chunks = [n for n in (2, 4, 8) if not any(kind.kv_heads % n for kind in goal.model.attending)]
    return [n for n in chunks if can_exchange(goal.model, replace(setting, head_chunks=n), degree)]


def fits(needed: TrainingMemory, cluster: Cluster) -> bool:
    """Return whether the GPUs and the hosts of a cluster have the memory that a setting needs."""
    return needed.gpu_bytes <= cluster.gpu_gib * GIB and needed.host_bytes <= cluster.host_gib * GIB


def plans_that_fit(goal: Goal, progress: Callable[[int, int], None] | None = None) -> list[Candidate]:
    """Return all settings that fit in memory, the fastest first, with their memory and seconds; [] if none does.

    Settings within 1 % of the fastest are ordered by how few levers (`LEVERS`), tensor and pipeline parallelism among
    them, they switch on. `progress` is called with how many settings have been priced and how many there are.
    """
    candidates, all_settings = [], list(settings(goal))
    for done, setting in enumerate(all_settings, start=1):
        if progress is not None:
            progress(done, len(all_settings))
        if surely_too_large(goal.model, setting, goal.cluster):
            continue
        needed = memory(goal.model, setting, goal.cluster)
        if fits(needed, goal.cluster):
            candidates.append(Candidate(setting, needed, step_seconds(goal.model, setting, goal.cluster)))
    if not candidates:
        return []
    least = min(candidate.step_s for candidate in candidates)

    def order(candidate: Candidate) -> tuple[bool, int, float, float]:
        is_slower = candidate.step_s > _ALIKE * least
        switched_on = sum(getattr(candidate.setting, name) != off for name, off in LEVERS.items())
        switched_on += (candidate.setting.tensor > 1) + (candidate.setting.pipeline > 1)
        return is_slower, 0 if is_slower else switched_on, candidate.step_s, candidate.memory.gpu_bytes

    return sorted(candidates, key=order)


def nearest(goal: Goal) -> list[TrainingMemory]:
    """Return the memory of the one or two settings that lack least where none fits; [] if there is no setting.

    First comes the setting with the smallest hosts among settings that fit into the GPUs, or, where none does, the
    setting that lacks the smallest share of either. Second, unless it takes over twice the share of memory that the
    nearest setting takes, comes the setting with the smallest GPUs among settings that fit into the hosts.
    """
    gpu_bytes, host_bytes = goal.cluster.gpu_gib * GIB, goal.cluster.host_gib * GIB
    on_hosts: TrainingMemory | None = None
    on_gpus: TrainingMemory | None = None
    on_both: TrainingMemory | None = None

    def share(needed: TrainingMemory) -> float:
        return max(needed.gpu_bytes / gpu_bytes, needed.host_bytes / host_bytes)

    for setting in settings(goal):
        needed = memory(goal.model, setting, goal.cluster)
        if needed.gpu_bytes <= gpu_bytes and (on_hosts is None or needed.host_bytes < on_hosts.host_bytes):
            on_hosts = needed
        if needed.host_bytes <= host_bytes and (on_gpus is None or needed.gpu_bytes < on_gpus.gpu_bytes):
            on_gpus = needed
        if on_both is None or share(needed) < share(on_both):
            on_both = needed
    if on_both is None:
        return []
    first = on_hosts or on_both
    is_second = on_gpus is not None and on_gpus != first and share(on_gpus) <= _BEYOND_REASON * share(on_both)
    return [first, on_gpus] if is_second and on_gpus is not None else [first]


def some_plan_fits(goal: Goal) -> bool:
    """Return whether any setting that `goal` allows fits in the memory of its GPUs and hosts."""
    if goal.cluster.process_gib * goal.cluster.gpus_per_node > goal.cluster.host_gib:
        return False  # whatever the setting
    possible = (setting for setting in settings(goal) if not surely_too_large(goal.model, setting, goal.cluster))
    return any(fits(memory(goal.model, setting, goal.cluster), goal.cluster) for setting in possible)


def longest(goal: Goal, trying: Callable[[int], None] | None = None) -> int:
    """Return the length of the longest sequence that fits with some setting, in steps of 65,536 tokens; 0 if none.

    The goal's own `tokens` do not count. `trying` is called with every number of tokens that is tried.
    """

    def fit(steps: int) -> bool:
        if trying is not None:
            trying(steps * _STEP)
        return some_plan_fits(replace(goal, tokens=steps * _STEP))

    if not fit(1):
        return 0
    high = 2
    while fit(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low * _STEP


def reasons(goal: Goal, chosen: Candidate) -> dict[str, str]:
    """Return, for each lever of `LEVERS` that a plan uses, by name, text on how the plan would be without it.

    For example "without it a GPU needs 95.3 GiB", or "without it a step takes 1.2 s more".
    """
    by_lever = {}
    for name, off in LEVERS.items():
        if getattr(chosen.setting, name) == off:
            continue
        without = replace(chosen.setting, **{name: off})  # type: ignore[arg-type]
        needed = memory(goal.model, without, goal.cluster)
        gib, host_gib = needed.gpu_bytes / GIB, needed.host_bytes / GIB
        slower_s = sum(step_seconds(goal.model, without, goal.cluster).values()) - chosen.step_s
        if gib > goal.cluster.gpu_gib:
            by_lever[name] = f"without it a GPU needs {gib:.1f} GiB"
        elif host_gib > goal.cluster.host_gib:
            by_lever[name] = f"without it a host needs {host_gib:.0f} GiB"
        elif slower_s > 0:
            seconds = f"{slower_s:.1f} s" if slower_s >= 0.05 else f"{1e3 * slower_s:.1f} ms"
            by_lever[name] = f"without it a step takes {seconds} more"
        else:
            by_lever[name] = f"without it a GPU has {gib - chosen.memory.gpu_bytes / GIB:.1f} GiB less to spare"
    return by_lever
