"""What a plan decides, and what it is given: the cluster, the code that runs, and the setting of a training run."""

from __future__ import annotations

from dataclasses import dataclass

from burst_plugin.planning.links import Links
from burst_plugin.topology import Topology

__all__ = ["RECOMPUTE", "Cluster", "Code", "Setting"]

RECOMPUTE = ("none", "mlp", "full")
"""What is computed again in the backward pass: nothing, the MLP of each layer, or whole layers."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of GPUs. Rates are what is reached, not what is advertised; by default an H100's.

    margin_gib: what of a GPU a plan leaves: the CUDA context, NCCL beside attention, cuBLAS, fragmentation.
    process_gib: what a process takes of its host before anything is offloaded: PyTorch, pinned batches, data loading.
    """

    nodes: int = 1
    gpus_per_node: int = 8
    gpu_gib: float = 80.0
    host_gib: float = 2048.0
    margin_gib: float = 4.0
    process_gib: float = 8.0
    peak_flops: float = 989e12
    matmul_share: float = 0.45
    attention_share: float = 0.54
    intra_bytes_per_s: float = 350e9
    inter_bytes_per_s: float = 40e9
    pcie_bytes_per_s: float = 40e9
    """Between a GPU and its host, in either direction, all GPUs of a node at once."""
    host_bytes_per_s: float = 200e9
    """Of a node's memory, while an optimizer runs on its CPUs."""

    @property
    def gpus(self) -> int:
        """Return how many GPUs all nodes have."""
        return self.nodes * self.gpus_per_node

    @property
    def links(self) -> Links:
        """Return the links as the simulator of schedules takes them."""
        return Links(self.intra_bytes_per_s, self.inter_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Code:
    """What the code of a framework's layers keeps and allocates.

    plain_norms: norms are written in single operations, which make float32 copies, and keep them unless they run in
        chunks; else they are one kernel each.
    mlp_kept: how many tensors [tokens, ffn] an MLP keeps: gate, up, act(gate) and their product, or fewer if fused.
    logit_bytes: bytes per element of whole logits while their loss is at work: in 16 bits, and copies in float32.
    sums_weights: gradients of weights come out of a backward pass as tensors, and chunks are summed up in float32;
        else they are added to the optimizer's gradients where they arise.
    waiting: how many results of tiles wait until they are added up; 1 without the fused kernel for GPUs.
    workspace: bytes that a backward kernel takes per element of q, for sums of dq in float32.
    """

    plain_norms: bool
    mlp_kept: int
    logit_bytes: int
    sums_weights: bool
    waiting: int = 4
    workspace: int = 4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train: how the model and a sequence are cut, what is kept, computed again, cut into chunks, moved.

    tokens: of one sequence. batch: sequences of a step. micro_batch: sequences that go through the model at once.
    tensor, context, pipeline, data: degrees of parallelism. `inner` context-parallel ranks are in a node.
    zero: what is sharded over all ranks of data and context parallelism: 1, the optimizer's states; 3, weights and
        gradients too.
    keep: the share of the sequence whose attention is kept while layers are computed again.
    loss_chunk, mlp_chunk: tokens per chunk, 0 for all at once. head_chunks: into how many chunks heads are cut.
    offload: what waits for the backward pass of layers that are computed again waits in host memory.
    offload_optimizer: the optimizer's states are in host memory, and it runs there.
    ulysses: ranks that exchange heads before and after the ring. parts: parts of the heads in the ring.
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

    @property
    def gpus(self) -> int:
        """Return how many GPUs are in use."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def microbatches(self) -> int:
        """Return how many micro-batches a pipeline, or a data-parallel rank, works through in a step."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def tokens_at_once(self) -> int:
        """Return how many tokens all ranks of a model work on at once: those of a micro-batch."""
        return self.micro_batch * self.tokens

    @property
    def local_tokens(self) -> int:
        """Return how many tokens of a sequence a rank's attention has; tensor-parallel ranks share them elsewhere."""
        return -(-self.tokens // self.context)

    @property
    def topology(self) -> Topology:
        """Return the context-parallel ranks on their nodes."""
        return Topology(self.context // self.inner, self.inner)

    @property
    def visits(self) -> int:
        """Return how many ranks, or groups of ranks that exchange heads, a ring has."""
        return self.context // self.ulysses

    @property
    def copying_norms(self) -> bool:
        """Return whether norms keep float32 copies for their backward pass; in chunks they keep inputs."""
        return self.code.plain_norms and not self.mlp_chunk

    @property
    def kept_share(self) -> float:
        """Return the largest share of a rank's tokens whose attention is kept; ranks differ: see `again_share`."""
        return max(self._kept_chunks(place) for place in range(self.visits)) / 2 if self.recompute == "full" else 1.0

    def again_share(self, window: int | None = None) -> float:
        """Return the share of attention that is computed forward again, on the rank that has most of it left.

        Place r in the ring has chunks r and 2 * visits - 1 - r of the 2 * visits chunks of a causal sequence.
        `window` is the most keys that a token attends to, itself included; None for all before it.
        """
        if self.recompute != "full":
            return 0.0
        chunks = 2 * self.visits
        reach = chunks if window is None else min(chunks, window * chunks / self.tokens)

        def pairs(stop: float) -> float:
            """Return the pairs of the queries in the first `stop` chunks, in units of a square of one chunk."""
            return stop**2 / 2 if stop < reach else reach**2 / 2 + (stop - reach) * reach

        def left(chunk: int, keep: float) -> float:
            tokens = min(1.0, max(0.0, (1 - keep) * chunks - chunk))  # of this chunk, that are not kept
            return pairs(chunk + tokens) - pairs(chunk)

        def most_left(keep: float) -> float:
            return max(left(place, keep) + left(chunks - 1 - place, keep) for place in range(self.visits))

        return most_left(self.keep) / most_left(0.0)

    def _kept_chunks(self, place: int) -> float:
        chunks = 2 * self.visits
        return sum(min(1.0, max(0.0, i + 1 - (1 - self.keep) * chunks)) for i in (place, chunks - 1 - place))
