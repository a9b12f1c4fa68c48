"""Models with multi-head latent attention (MLA, arXiv 2405.04434): its sizes, and their MLPs, by `model_type`.

A row of `LATENT_FAMILIES` has the defaults of transformers for keys that a config.json leaves out, and a function
that returns the MLP or the experts of every layer. Attention is the same in all layers: see `latent_sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from burst_plugin.checks import as_whole, shown
from burst_plugin.training.expert_layers import LAYERS, SHARED_WIDTH, experts, sparse_layers
from burst_plugin.training.hybrid_families import Config, HybridFamily, Layer, Size, chosen, dense, layer_kinds
from burst_plugin.training.mixers import channel_delta_rule


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """The sizes of multi-head latent attention: of latents, and of the keys and values that are made of them.

    q_rank: numbers per token in the latents of queries, 0 where one matrix projects queries.
    rank: numbers per token in the latents of keys and values.
    own_dim, shared_dim: dims of a head's keys that are its own, and that all heads share, with rotary embedding.
    value_dim: dims of a head's values.
    """

    q_rank: int
    rank: int
    own_dim: int
    shared_dim: int
    value_dim: int

    @property
    def qk_dim(self) -> int:
        """Return the dim of a head's queries and keys."""
        return self.own_dim + self.shared_dim

    @property
    def sent(self) -> tuple[int, int]:
        """Return the numbers that travel per token on a ring: (of latents, of the keys that heads share)."""
        return self.rank, self.shared_dim

    def up_weights(self, heads: int) -> int:
        """Return how many weights project latents to the keys and values of `heads` heads, in one layer."""
        return self.rank * heads * (self.own_dim + self.value_dim)

    def weights(self, hidden: int, heads: int) -> int:
        """Return how many weights all projections of one layer's attention have, up- and output projections included.

        `hidden` is the model's hidden size, `heads` its number of heads.
        """
        queries = self.q_rank * (hidden + heads * self.qk_dim) if self.q_rank else hidden * heads * self.qk_dim
        return queries + hidden * sum(self.sent) + self.up_weights(heads) + heads * self.value_dim * hidden


@dataclass(frozen=True, kw_only=True)
class IndexerSizes:
    """The sizes of sparse attention, whose queries attend to selected keys (DeepSeek V3.2), and of its indexer.

    heads, dim: of the indexer's queries; its keys are shared by all heads.
    top_k: the most keys that a query attends to.
    scores: whether the layer has an indexer itself, or takes the keys that an earlier one has selected.
    """

    heads: int
    dim: int
    top_k: int
    scores: bool = True

    def weights(self, hidden: int, q_rank: int) -> int:
        """Return how many weights project hidden states and latents of queries to an indexer's tensors."""
        return (q_rank * self.heads * self.dim + hidden * (self.dim + self.heads)) * self.scores


def latent_sizes(config: Config, size: Size) -> LatentSizes:
    """Return the sizes of the latent attention that a config.json describes.

    `size(key, ..., default=None)` returns the first whole number that the config.json has under these keys, or the
    default, and raises ValueError if there is neither.
    """
    return LatentSizes(
        q_rank=size("q_lora_rank", default=0),
        rank=size("kv_lora_rank"),
        own_dim=size("qk_nope_head_dim"),
        shared_dim=size("qk_rope_head_dim"),
        value_dim=size("v_head_dim", default=size("hidden_size") // size("num_attention_heads")),
    )


def _of_attention(config: Config, size: Size) -> int:
    """Return the parameters of a layer's attention that are in no product: norms of latents, and biases."""
    sizes = latent_sizes(config, size)
    biases = sizes.q_rank + sum(sizes.sent) + size("hidden_size") if config.get("attention_bias") else 0
    return sizes.q_rank + sizes.rank + biases


def _mlp(config: Config, size: Size) -> Layer:
    """Return a layer with a plain MLP."""
    width = size("intermediate_size")
    return dense(width, _of_attention(config, size) + _mlp_biases(config, size, width))


def _mlp_biases(config: Config, size: Size, width: int) -> int:
    has = config.get("mlp_bias") and config.get("model_type") in _WITH_MLP_BIASES and width
    return 2 * width + size("hidden_size") if has else 0


def _all_dense(config: Config, size: Size) -> list[Layer]:
    return [_mlp(config, size)] * size("num_hidden_layers")


def _indexed(config: Config, size: Size) -> list[Layer]:
    """Return layers with experts whose queries select keys; some may take the keys of the layer before them."""
    layers = _with_experts(config, size)
    kinds = _indexer_kinds(config, size, len(layers))
    indexed_layers: list[Layer] = []
    for kind, layer in zip(kinds, layers, strict=True):
        indexer = IndexerSizes(
            heads=size("index_n_heads"),
            dim=size("index_head_dim"),
            top_k=size("index_topk"),
            scores=kind == "full",
        )
        norm = 2 * indexer.dim * indexer.scores
        indexed_layers.append({**layer, "indexer": indexer, "extra": layer["extra"] + norm})
    return indexed_layers


def _indexer_kinds(config: Config, size: Size, layers: int) -> list[str]:
    """Return for each layer "full" if it selects keys itself, "shared" if it takes those of the layer before it."""
    key = "index_topk_pattern" if config.get("indexer_types") is None else "indexer_types"
    if (listed := config.get(key)) is None:
        period, first = size("index_topk_freq", default=1) or 1, size("index_skip_topk_offset", default=2)
        return ["shared" if max(layer - first + 1, 0) % period else "full" for layer in range(layers)]
    letters = {"F": "full", "S": "shared"}
    kinds = [letters.get(str(kind), str(kind)) for kind in listed] if isinstance(listed, list | str) else []
    if len(kinds) != layers or any(kind not in ("full", "shared") for kind in kinds):
        raise ValueError(f'{key} is {shown(listed)}, expected a list with "full" or "shared" for {layers} layers')
    return kinds


def _with_experts(config: Config, size: Size) -> list[Layer]:
    layer = experts(size)
    sparse = {**layer, "extra": _of_attention(config, size) + _mlp_biases(config, size, layer["shared_ffn"])}
    has_experts = sparse_layers(config, size, size("num_hidden_layers"))
    return [sparse if has else _mlp(config, size) for has in has_experts]


def _normed_experts(config: Config, size: Size) -> list[Layer]:
    """Return layers as DeepSeek V3's, with a norm after experts."""
    return [
        {**layer, "mlp_norms": 1, "extra": layer["extra"] + size("hidden_size")} if layer["experts"] else layer
        for layer in _with_experts(config, size)
    ]


def _kimi_linear(config: Config, size: Size) -> list[Layer]:
    """Return layers of which every fourth has latent attention, and all others Kimi Delta Attention."""
    for key in ("v_head_dim", "moe_intermediate_size", "num_experts", "num_experts_per_token"):
        size(key, least=1)  # which no other key replaces where it is null
    size("num_shared_experts", least=0)
    if config.get("mlp_layer_types") is None:
        size("first_k_dense_replace", least=0)
    section = config.get("linear_attn_config", {})
    if not isinstance(section, Mapping):
        raise ValueError(f"linear_attn_config is {shown(section)}, expected an object with num_heads and head_dim")
    heads, head_dim, width = (
        size(f"linear_attn_config.{key}" if key in section else usual, least=1) for key, usual in _KIMI_SIZES.items()
    )
    mixer = channel_delta_rule(hidden=size("hidden_size"), heads=heads, head_dim=head_dim, width=width)
    layers = _with_experts(config, size)
    kinds = layer_kinds(config, len(layers)) or _kimi_kinds(section, len(layers))
    mixing = {"attends": False, "latent": None, "mixer": mixer, "extra": -_of_attention(config, size)}
    return chosen(kinds, {"full_attention": {}, "linear_attention": mixing}, layers)


def _kimi_kinds(section: Config, layers: int) -> list[str]:
    """Return the kinds of layers by both lists of a `linear_attn_config`, which count from 1, or the usual kinds."""
    if not all(key in section for key in _KIMI_LISTS):
        return ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(layers)]
    kinds = [""] * layers
    for key, kind in _KIMI_LISTS.items():
        numbers = section[key]
        if not isinstance(numbers, list | tuple):
            raise ValueError(f"linear_attn_config.{key} is {shown(numbers)}, expected a list of layers")
        for entry in numbers:
            number = as_whole(entry)
            if number is None or not 1 <= number <= layers:
                raise ValueError(f"linear_attn_config.{key} has {shown(entry)}, expected layers from 1 to {layers}")
            if kinds[number - 1] not in ("", kind):
                raise ValueError(f"linear_attn_config.{key} has {number}, as {_FULL} has; keep it in one of them")
            kinds[number - 1] = kind
    if "" in kinds:
        raise ValueError(
            f"linear_attn_config has layer {kinds.index('') + 1} of {layers} in neither list; add it to "
            f"{' or '.join(_KIMI_LISTS)}"
        )
    return kinds


_FULL = "full_attn_layers"
_KIMI_LISTS = MappingProxyType({_FULL: "full_attention", "kda_layers": "linear_attention"})
# By names in the linear_attn_config of published files, those that transformers writes.
_KIMI_SIZES = MappingProxyType(
    {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
)
_IGNORED_BY_KIMI = tuple(
    {"tie_word_embeddings", "layers_block_type", "n_routed_experts", *SHARED_WIDTH, *LAYERS}
    - {"first_k_dense_replace"}
)


_DEEPSEEK = MappingProxyType(
    {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
)

_DEEPSEEK_V3 = MappingProxyType(
    {
        **_DEEPSEEK,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
    }
)
_INDEXER = MappingProxyType({"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048})
_IN_CHUNKS = ("mlp",)
LATENT_HYBRIDS = ("kimi_linear",)
"""Families of which some layers have another mixer than latent attention."""
_WITH_MLP_BIASES = ("deepseek_v2", "minicpm3")  # if mlp_bias says so, which other families ignore

LATENT_FAMILIES: Mapping[str, HybridFamily] = MappingProxyType(
    {
        "deepseek_v2": HybridFamily(
            layers=_with_experts,
            in_chunks=_IN_CHUNKS,
            defaults={**_DEEPSEEK, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2},
        ),
        "deepseek_v3": HybridFamily(
            layers=_with_experts,
            in_chunks=_IN_CHUNKS,
            defaults=_DEEPSEEK_V3,
        ),
        "sarvam_mla": HybridFamily(
            layers=_with_experts,
            in_chunks=_IN_CHUNKS,
            names={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
            defaults={**_DEEPSEEK_V3, "q_lora_rank": None, "n_routed_experts": 128, "first_k_dense_replace": 1},
        ),
        "axk1": HybridFamily(
            layers=_normed_experts,
            in_chunks=_IN_CHUNKS,
            defaults={**_DEEPSEEK_V3, "n_routed_experts": 192, "first_k_dense_replace": 1},
        ),
        "kimi_linear": HybridFamily(
            layers=_kimi_linear,
            in_chunks=_IN_CHUNKS,
            names={
                "num_local_experts": "num_experts",
                "num_experts_per_tok": "num_experts_per_token",
                "n_shared_experts": "num_shared_experts",
            },
            ignored=_IGNORED_BY_KIMI,
            defaults={
                **_DEEPSEEK,
                "q_lora_rank": None,
                "moe_intermediate_size": 1024,
                "num_experts": 256,
                "num_shared_experts": 1,
                "num_experts_per_token": 8,
                "first_k_dense_replace": 1,
                "linear_head_dim": 128,
                "linear_num_heads": 32,
                "linear_conv_kernel_dim": 4,
            },
        ),
        "deepseek_v32": HybridFamily(
            layers=_indexed,
            in_chunks=_IN_CHUNKS,
            ignored=("indexer_types", "index_topk_pattern", "index_topk_freq"),
            defaults={**_DEEPSEEK_V3, **_INDEXER},
        ),
        "glm_moe_dsa": HybridFamily(
            layers=_indexed,
            in_chunks=_IN_CHUNKS,
            defaults={
                **_DEEPSEEK_V3,
                **_INDEXER,
                "q_lora_rank": 2048,
                "qk_nope_head_dim": 192,
                "v_head_dim": 256,
                "index_n_heads": 32,
            },
        ),
        "glm4_moe_lite": HybridFamily(
            layers=_with_experts,
            in_chunks=_IN_CHUNKS,
            names={"head_dim": "qk_rope_head_dim"},
            defaults={
                **_DEEPSEEK,
                "q_lora_rank": 768,
                "qk_nope_head_dim": 192,
                "v_head_dim": 256,
                "moe_intermediate_size": 1536,
                "n_routed_experts": 64,
                "n_shared_experts": 1,
                "num_experts_per_tok": 4,
                "first_k_dense_replace": 1,
            },
        ),
        "mistral4": HybridFamily(
            layers=_with_experts,
            in_chunks=_IN_CHUNKS,
            defaults={
                **_DEEPSEEK,
                "kv_lora_rank": 256,
                "q_lora_rank": 1024,
                "qk_nope_head_dim": 64,
                "moe_intermediate_size": 2048,
                "n_routed_experts": 128,
                "n_shared_experts": 1,
                "num_experts_per_tok": 4,
            },
        ),
        "minicpm3": HybridFamily(
            layers=_all_dense,
            in_chunks=_IN_CHUNKS,
            defaults={
                "kv_lora_rank": 256,
                "q_lora_rank": 768,
                "qk_nope_head_dim": 64,
                "qk_rope_head_dim": 32,
                "tie_word_embeddings": True,
            },
        ),
        "youtu": HybridFamily(
            layers=_all_dense, in_chunks=_IN_CHUNKS, defaults={**_DEEPSEEK, "tie_word_embeddings": True}
        ),
    }
)
