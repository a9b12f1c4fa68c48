"""Mixers of tokens, by a state along the sequence or by a short convolution, as numbers for a plan of training.

    mixer = delta_rule(hidden=2048, keys=(16, 128), values=(32, 128), width=4)
    mixer.parameters, mixer.flops, mixer.saved

There is a function for each kind. Activations are counted for transformers' layers around the kernels of
flash-linear-attention, mamba-ssm and causal-conv1d, in 16 bits; kernels of PyTorch, which run where these are not
installed, keep more. tests/planning/test_hybrid_memory.py compares peaks with measured ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

BF16, FP32 = 2, 4
_CHUNK = 64  # tokens of a chunk of flash-linear-attention's kernels
_STATE_CHUNK = 256  # of mamba-ssm's
_ELEMENTWISE = 8.0  # times an operation of a scan without matrix products takes the time of one in such a product


@dataclass(frozen=True, kw_only=True)
class TokenMixer:
    """The sizes and costs of one layer's token mixer other than attention, such as Mamba-2, for the planner.

    kind: its name, such as "Mamba-2".
    parameters, weights: how many parameters it has, and how many of them are weights of projections, which multiply
        every token.
    tensors: the inputs of the kernel, (name, heads, numbers per head and token, bytes of a number); the first is as
        wide as its output.
    by_heads: whether ranks can exchange heads instead of states.
    state, transition: numbers of a state, and of the transition that multiplies it, of all heads.
    flops: FLOPs of the kernel for one token, forward. on_ring: further FLOPs where states come from other ranks.
    on_ring_backward: further FLOPs of the backward pass there; None if they are to `on_ring` as the kernel's own are
        to `flops`.
    conv: channels of the convolution, times the tokens that it looks back at.

    Bytes for one token: `saved` is kept from the forward to the backward pass. `of_norm` is kept as well, by the norm
    and gate of the output: (if they are one kernel, if they are single operations); `saved_on_ring` where states come
    from other ranks. `gradients` are the most that exist beside them in the mixer's backward pass, `norm_gradients`
    the most in the backward pass of its norm in single operations, and `workspace` is the kernel's own.
    """

    kind: str
    parameters: int
    weights: int
    tensors: tuple[tuple[str, int, int, int], ...]
    by_heads: bool
    state: int
    transition: int
    flops: float
    on_ring: float
    conv: int
    saved: float
    of_norm: tuple[float, float]
    gradients: float
    norm_gradients: float
    on_ring_backward: float | None = None
    saved_on_ring: float = 0.0
    workspace: float = 0.0

    @property
    def exchanged(self) -> int:
        """Return the bytes of the kernel's inputs for one token, which an exchange of heads sends."""
        return sum(heads * numbers * nbytes for _, heads, numbers, nbytes in self.tensors)


def _delta_flops(heads: int, key_dim: int, value_dim: int) -> float:
    """Return the operations of the chunked delta rule for one token: on the state, and inside chunks."""
    return heads * (6.0 * key_dim * value_dim + 2 * _CHUNK * (3 * key_dim + 2 * value_dim))


def delta_rule(
    *,
    hidden: int,
    keys: tuple[int, int],
    values: tuple[int, int],
    width: int,
    kind: str = "gated delta net",
) -> TokenMixer:
    """Return the sizes and costs of a gated delta net, as in Qwen3-Next.

    hidden: the hidden size. keys, values: (heads, dim of a head). width: tokens that its convolution spans.
    kind: its name in the plan.
    """
    (key_heads, key_dim), (heads, value_dim) = keys, values
    key_size, value_size = key_heads * key_dim, heads * value_dim
    channels = 2 * key_size + value_size
    weights = hidden * (channels + value_size + 2 * heads) + value_size * hidden
    gates = heads * (2 * BF16 + 3 * FP32)  # beta before and after the sigmoid, and three steps of g
    within_chunks = heads * _CHUNK * BF16  # products of keys with keys
    return TokenMixer(
        kind=kind,
        parameters=weights + channels * width + 2 * heads + value_dim,
        weights=weights,
        tensors=(
            ("v", heads, value_dim, BF16),
            ("q", key_heads, key_dim, BF16),
            ("k", key_heads, key_dim, BF16),
            ("g", heads, 1, FP32),
            ("beta", heads, 1, BF16),
        ),
        by_heads=True,
        state=heads * key_dim * value_dim,
        transition=heads * key_dim**2,
        flops=_delta_flops(heads, key_dim, value_dim),
        on_ring=heads * 4.0 * key_dim * (key_dim + value_dim),  # A and B: two products of each chunk with either
        on_ring_backward=_delta_flops(heads, key_dim, value_dim),  # gradients of entering states
        conv=channels * (width - 1),
        saved=BF16 * 2 * channels + gates + within_chunks,  # before and after the convolution
        # The output, its gate, and both together; or copies of them in float32, the gate's silu, and the norm's steps
        of_norm=(BF16 * 3 * value_size, (3 * FP32 + 3 * BF16) * value_size),
        # Of the kernel that returns A and B: wider values, and queries and keys, normalized once more
        saved_on_ring=BF16 * (heads * (value_dim + key_dim) + 2 * key_size) + within_chunks,
        gradients=BF16 * (2 * channels + value_size) + heads * 2 * FP32,
        norm_gradients=value_size * 5 * BF16,  # in float32, while what the norm returned is gone
        workspace=heads * (2 * key_dim * value_dim / _CHUNK + 2 * key_dim + value_dim) * BF16,
    )


def channel_delta_rule(*, hidden: int, heads: int, head_dim: int, width: int) -> TokenMixer:
    """Return the sizes and costs of Kimi Delta Attention: a delta rule whose state decays by channel of the keys.

    hidden: the hidden size. heads, head_dim: of queries, keys and values. width: tokens that its convolution spans.
    """
    inner = heads * head_dim
    plain = delta_rule(hidden=hidden, keys=(heads, head_dim), values=(heads, head_dim), width=width)
    weights = hidden * (3 * inner + heads + 2 * head_dim) + 2 * head_dim * inner + inner * hidden
    # In float32: three steps of the gate in single operations, and what the kernel keeps; a condition for each
    gates = inner * (4 * FP32 + 1) + heads * (BF16 + FP32)
    return replace(
        plain,
        kind="Kimi delta attention",
        parameters=weights + 3 * inner * width + heads + inner + head_dim,
        weights=weights,
        tensors=(*plain.tensors[:3], ("g", heads, head_dim, FP32), ("beta", heads, 1, BF16)),
        saved=BF16 * (2 * 3 * inner + 2 * head_dim) + gates + 2 * heads * _CHUNK * BF16,
        gradients=BF16 * (2 * 3 * inner + inner),
        saved_on_ring=plain.saved_on_ring + FP32 * inner,
    )


def state_space(
    *,
    hidden: int,
    heads: int,
    head_dim: int,
    groups: int,
    size: int,
    width: int,
    has_norm: bool = True,
    biases: tuple[bool, bool, bool] = (True, False, False),
) -> TokenMixer:
    """Return the sizes and costs of a Mamba-2 mixer.

    hidden: the hidden size. heads, head_dim: of its input x. groups: of B and C, which heads share.
    size: numbers of a state per channel. width: tokens that its convolution spans.
    has_norm: whether its output is normalized.
    biases: whether the convolution, the projection to it, and the projection back have biases.
    """
    inner, shared = heads * head_dim, groups * size
    channels = inner + 2 * shared
    projected = inner + channels + heads
    weights = hidden * (projected + inner)
    of_conv, of_input, of_output = biases
    others = channels * (width + of_conv) + 3 * heads + inner * has_norm + projected * of_input + hidden * of_output
    within_chunks = groups * 2 * _STATE_CHUNK * size + heads * 2 * _STATE_CHUNK * head_dim
    return TokenMixer(
        kind="Mamba-2",
        parameters=weights + others,
        weights=weights,
        tensors=(
            ("x", heads, head_dim, BF16),
            ("dt", heads, 1, FP32),
            ("B", groups, size, BF16),
            ("C", groups, size, BF16),
        ),
        by_heads=True,
        state=inner * size,
        transition=heads,
        flops=4.0 * inner * size + within_chunks,
        on_ring=2.0 * inner * size,  # what the entering state adds to the output
        conv=channels * (width - 1),
        saved=BF16 * 2 * channels + 2 * FP32 * heads,  # before and after the convolution
        # The output, all that is projected, of which the gate is a part, and what comes of them; or copies in float32
        of_norm=(
            BF16 * (projected + 2 * inner),
            (4 * FP32 + 2 * BF16) * inner if has_norm else BF16 * (projected + 3 * inner),
        ),
        saved_on_ring=FP32 * (inner + shared),  # what the entering state adds to the output, and C
        gradients=BF16 * (projected + 2 * channels + inner),
        norm_gradients=inner * 4 * FP32 if has_norm else 0.0,
        workspace=inner * size / _STATE_CHUNK * 2 * FP32 + heads * FP32,
    )


def selective_scan(
    *,
    hidden: int,
    inner: int,
    size: int,
    rank: int,
    width: int,
    has_norms: bool = False,
    biases: tuple[bool, bool] = (True, False),
) -> TokenMixer:
    """Return the sizes and costs of a Mamba mixer (the first version).

    hidden: the hidden size. inner: channels of the scan. size: numbers of a state per channel.
    rank: of the projection of its steps dt. width: tokens that its convolution spans.
    has_norms: whether dt, B and C are normalized, as in Jamba.
    biases: whether the convolution, and projections, have biases.
    """
    of_conv, of_projections = biases
    weights = hidden * 3 * inner + inner * (rank + 2 * size) + rank * inner
    others = inner * (width + of_conv) + inner + inner * (size + 1)  # of the convolution, of steps, A and D
    others += (2 * inner + hidden) * of_projections + (rank + 2 * size) * has_norms
    return TokenMixer(
        kind="Mamba",
        parameters=weights + others,
        weights=weights,
        tensors=(("x", 1, inner, BF16), ("dt", 1, inner, FP32), ("B", 1, size, BF16), ("C", 1, size, BF16)),
        by_heads=False,
        state=inner * size,
        transition=inner * size,
        flops=_ELEMENTWISE * 9 * inner * size,
        on_ring=_ELEMENTWISE * 4 * inner * size,
        conv=inner * (width - 1),
        # What is projected, what comes of the convolution, steps, the output before and after the gate
        saved=BF16 * (2 * inner + 4 * inner + 2 * size + rank),
        of_norm=(0.0, (rank + 2 * size) * 2 * FP32 * has_norms),
        gradients=BF16 * (2 * inner + 4 * inner),
        norm_gradients=0.0,
        workspace=inner * size / 2048 * 2 * FP32,
    )


def decay_attention(*, hidden: int, heads: int, head_dim: int) -> TokenMixer:
    """Return the sizes and costs of lightning attention, as in MiniMax; its kernel runs in PyTorch, in float32."""
    inner = heads * head_dim
    weights = 5 * hidden * inner  # to q, k, v and the gate, and back
    within_chunks = heads * _CHUNK * FP32
    return TokenMixer(
        kind="lightning attention",
        parameters=weights + inner,
        weights=weights,
        tensors=tuple((name, heads, head_dim, BF16) for name in "vqk"),
        by_heads=True,
        state=inner * head_dim,
        transition=heads,
        flops=inner * (4.0 * head_dim + 4 * _CHUNK),
        on_ring=2.0 * inner * head_dim,
        conv=0,
        # What is projected, before and after the activation, and in float32; the output, its norm, gate and product
        saved=BF16 * 6 * inner + FP32 * 3 * inner + within_chunks + BF16 * 4 * inner,
        of_norm=(0.0, inner * (FP32 + BF16)),
        saved_on_ring=inner * FP32,
        gradients=FP32 * 4 * inner + within_chunks,
        norm_gradients=inner * 4 * FP32,
    )


def short_convolution(*, hidden: int, width: int, has_bias: bool) -> TokenMixer:
    """Return the sizes and costs of a gated short convolution, as in LFM2, which spans `width` tokens."""
    weights = 4 * hidden * hidden
    return TokenMixer(
        kind="short convolution",
        parameters=weights + hidden * width + 5 * hidden * has_bias,
        weights=weights,
        tensors=(),
        by_heads=False,
        state=0,
        transition=0,
        flops=2.0 * hidden * width,
        on_ring=0.0,
        conv=hidden * (width - 1),
        saved=BF16 * 6 * hidden,  # what is projected, three times as wide; the convolution's input, output; gated
        of_norm=(0.0, 0.0),
        gradients=BF16 * 6 * hidden,
        norm_gradients=0.0,
    )
