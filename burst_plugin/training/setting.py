"""A way to train: what a framework's layers keep, how a run is set up, and the options of `Strategy` for it."""

from __future__ import annotations

from dataclasses import dataclass

from burst_plugin.strategy import AUTO
from burst_plugin.topology import Topology
from burst_plugin.training.latent_families import LatentSizes
from burst_plugin.training.model_shape import ModelShape

RECOMPUTE = ("none", "mlp", "full")
"""What is computed again in the backward pass: nothing, the MLP of each layer, or whole layers."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """The memory that the code of a framework's layers keeps and allocates.

    plain_norms: norms are written in single operations, which make float32 copies, and keep them unless they run in
        chunks; else they are one kernel each.
    mlp_kept: how many tensors [tokens, ffn] an MLP keeps: gate, up, act(gate) and their product, or fewer if fused.
    logit_bytes: bytes per element of whole logits while their loss is at work: in 16 bits, and copies in float32.
    sums_weights: gradients of weights come out of a backward pass as tensors, and chunks are summed up in float32;
        else they are added to the optimizer's gradients where they arise.
    weighs_results: results of experts are multiplied by routing weights, each by itself; else tensors inside experts.
    plain_mixers: norms of mixers, with their gates, are written in single operations; else one kernel each.
    chunks_again: whether MLPs in chunks inside of checkpointed layers, and logits in chunks, are computed once more
        than without chunks.
    waiting: how many results of tiles wait until they are added up; 1 without the fused kernel for GPUs.
    workspace: bytes that a backward kernel takes per element of q, for sums of dq in float32.
    """

    plain_norms: bool
    mlp_kept: int
    logit_bytes: int
    sums_weights: bool
    plain_mixers: bool = False
    weighs_results: bool = False
    chunks_again: bool = False
    waiting: int = 4
    workspace: int = 4

    @classmethod
    def of_modules(cls, fused_norms: bool) -> Code:
        """Return the code of layers that are written as PyTorch modules, as transformers' are.

        fused_norms: whether norms are one kernel each, as with Liger; norms of mixers are single operations in any
            case.
        """
        return cls(
            plain_norms=not fused_norms,
            mlp_kept=4,
            logit_bytes=12,
            sums_weights=True,
            plain_mixers=True,
            weighs_results=True,
        )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train: degrees of parallelism, recomputation, chunks, offloading, and the options of the ring.

    tokens: of one sequence. batch: sequences of a step. micro_batch: sequences that go through the model at once.
    tensor, context, pipeline, data: degrees of parallelism. `inner` context-parallel ranks are in a node.
    zero: the stage of sharding over all ranks of data and context parallelism: 1, the optimizer's states; 3, weights
        and gradients too.
    recompute: what the backward pass computes again: "none", "mlp" (each layer's MLP) or "full" (whole layers).
    keep: the share of the sequence whose attention is kept while layers are computed again.
    loss_chunk, mlp_chunk: tokens per chunk, 0 for all at once. head_chunks: into how many chunks heads are cut.
    offload: tensors that wait for the backward pass of layers that are computed again wait in host memory.
    offload_optimizer: the optimizer's states are in host memory, and it runs there.
    ulysses: ranks that exchange heads before and after the ring. parts: parts of the heads in the ring.
    recurrent: whether layers with a state exchange states, "state", or heads, "heads".
    latents: as `Strategy.latents`: with "expand" the ring of latent attention sends keys and values made of latents;
        for other values see `latents_sent`.
    """

    tokens: int
    code: Code
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    inner: int = 1
    batch: int = 1
    micro_batch: int = 1
    zero: int = 1
    recompute: str = "full"
    keep: float = 0.0
    loss_chunk: int = 0
    mlp_chunk: int = 0
    head_chunks: int = 1
    offload: bool = False
    offload_optimizer: bool = False
    ulysses: int = 1
    parts: int = 1
    recurrent: str = "state"
    latents: str = AUTO

    @property
    def gpus(self) -> int:
        """Return how many GPUs the setting uses: tensor x context x pipeline x data."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def microbatches(self) -> int:
        """Return the number of micro-batches that a data-parallel rank, or its pipeline, runs in a step."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def tokens_at_once(self) -> int:
        """Return the tokens of one micro-batch, of all its sequences and before they are cut."""
        return self.micro_batch * self.tokens

    @property
    def local_tokens(self) -> int:
        """Return one rank's tokens of a sequence in attention; elsewhere tensor-parallel ranks share them."""
        return -(-self.tokens // self.context)

    @property
    def topology(self) -> Topology:
        """Return the topology of the context-parallel ranks."""
        return Topology(self.context // self.inner, self.inner)

    @property
    def ring_size(self) -> int:
        """Return how many ranks, or groups of ranks that exchange heads, a ring has."""
        return self.context // self.ulysses

    @property
    def copying_norms(self) -> bool:
        """Return whether norms keep float32 copies for backward: if in single operations, and not in chunks."""
        return self.code.plain_norms and not self.mlp_chunk

    @property
    def kept_share(self) -> float:
        """Return the share of its tokens whose attention a rank keeps, on the rank that keeps most.

        It is 1 where whole layers are not computed again. Else `keep` is the share of the sequence, at its end, that
        is kept; ranks may hold unequal shares of it. The work that is left for other tokens is `again_share`.
        """
        if self.recompute != "full":
            return 1.0
        return max(self._kept_chunks(place) for place in range(self.ring_size)) / 2

    def again_share(self, window: int | None = None) -> float:
        """Return the share of attention's forward work that is computed again, on the rank that has most of it.

        It is 0 where whole layers are not computed again, or all attention is kept, and 1 where none is. Place r in
        the ring has chunks r and 2 * ring_size - 1 - r of the 2 * ring_size chunks of a causal sequence. `window` is
        the most keys that a token attends to, itself included; None for all before it.
        """
        if self.recompute != "full":
            return 0.0
        chunks = 2 * self.ring_size
        reach = chunks if window is None else min(chunks, window * chunks / self.tokens)

        def pairs(stop: float) -> float:
            """Return the pairs of the queries in the first `stop` chunks, in units of a square of one chunk."""
            return stop**2 / 2 if stop < reach else reach**2 / 2 + (stop - reach) * reach

        def left(chunk: int, keep: float) -> float:
            tokens = min(1.0, max(0.0, (1 - keep) * chunks - chunk))  # of this chunk, that are not kept
            return pairs(chunk + tokens) - pairs(chunk)

        def most_left(keep: float) -> float:
            return max(left(place, keep) + left(chunks - 1 - place, keep) for place in range(self.ring_size))

        return most_left(self.keep) / most_left(0.0)

    def _kept_chunks(self, place: int) -> float:
        chunks = 2 * self.ring_size
        return sum(min(1.0, max(0.0, i + 1 - (1 - self.keep) * chunks)) for i in (place, chunks - 1 - place))


def latents_sent(model: ModelShape, setting: Setting) -> LatentSizes | None:
    """Return the sizes of latents that a ring sends in place of keys and values; None if it sends keys and values.

    It sends latents in models that have them, on several context-parallel ranks, unless heads are exchanged, in parts
    or in chunks, or `latents="expand"`: see `Strategy.latents`.
    """
    cut = (setting.ulysses, setting.parts, setting.head_chunks)
    return model.latent if setting.context > 1 and cut == (1, 1, 1) and setting.latents != "expand" else None


def strategy_options(model: ModelShape, setting: Setting) -> dict[str, object]:
    """Return the options of `Strategy` for a setting, by name, without defaults, in the order of docs/options.md."""
    options: dict[str, object] = {}
    if setting.ulysses > 1:
        options["ulysses_degree"] = setting.ulysses
    if setting.parts > 1:
        options["parts"] = setting.parts
    if setting.keep:
        options["keep_attention"] = "all" if setting.keep == 1.0 else setting.keep
    if setting.loss_chunk:
        options["loss_chunk"] = setting.loss_chunk
    if setting.mlp_chunk:
        options["mlp_chunk"] = setting.mlp_chunk
    if setting.head_chunks > 1:
        options["head_chunk"] = model.heads // setting.head_chunks
    if setting.offload:
        options["offload"] = True
    if setting.context > 1 and any(mixer.by_heads for mixer, _ in model.mixers):
        options["recurrent"] = setting.recurrent
    if setting.latents != AUTO:
        options["latents"] = setting.latents
    return options


def layout_in_words(setting: Setting) -> str:
    """Return text on how the model and the sequence are divided among GPUs.

    For example "TP 1 x CP 16 x PP 1 x DP 1, CP over 2 nodes of 8, of which 4 exchange heads".
    """
    cut = f"TP {setting.tensor} x CP {setting.context} x PP {setting.pipeline} x DP {setting.data}"
    nodes = setting.context // setting.inner
    if nodes > 1:
        cut += f", CP over {nodes} nodes of {setting.inner}"
    if setting.ulysses > 1:
        cut += f", of which {setting.ulysses} exchange heads"
    return cut
