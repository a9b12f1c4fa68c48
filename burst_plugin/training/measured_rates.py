"""The rates of a cluster that `burst check` has measured, as a plan of a model's training takes them."""

from __future__ import annotations

from burst_plugin.profiling.cluster_profile import ClusterProfile
from burst_plugin.training.model_shape import ModelShape

_BACKWARD = 2.5  # times the operations of a forward pass that attention's backward pass has


def measured_rates(profile: ClusterProfile, model: ModelShape, peak_flops: float) -> dict[str, float]:
    """Return the fields of `Cluster` that a profile has measured, by name; shares are fractions of `peak_flops`.

    `peak_flops` is the FLOP per second of a GPU. Attention has the rate of the longest tile, both passes together.
    Layers with a state have the rate of the model's slowest kind, or, if none of its kinds was measured, of the
    slowest kind that was.
    """
    rates = {}
    longest = profile.rates[-1]
    attention = (1 + _BACKWARD) / (1 / longest.forward_flops_per_s + _BACKWARD / longest.backward_flops_per_s)
    rates["attention_share"] = attention / peak_flops
    kinds = {mixer.kind for mixer, _ in model.mixers} & set(profile.recurrent) or set(profile.recurrent)
    if kinds:
        rates["recurrent_share"] = min(profile.recurrent[kind] for kind in kinds) / peak_flops
    if profile.intra is not None:
        rates["intra_bytes_per_s"] = profile.intra.bytes_per_s
    if profile.inter is not None:
        share = profile.ranks_per_node if profile.nic == "node" else 1
        rates["inter_bytes_per_s"] = profile.inter.bytes_per_s / share
    links = [link.latency_s for link in (profile.intra, profile.inter) if link is not None]
    if links:
        rates["hop_s"] = max(links)
    return rates
