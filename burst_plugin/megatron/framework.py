"""What Megatron says about itself, for the launcher and `burst doctor`. Imports no Megatron."""

from __future__ import annotations

from burst_plugin.frameworks.framework import Framework
from burst_plugin.megatron.arguments import written

__all__ = ["FRAMEWORK"]

FRAMEWORK = Framework(
    name="megatron",
    title="Megatron",
    distribution="megatron-core",
    packages=("megatron-core", "transformer-engine", "flash-attn"),
    subject=("TREE", "a Megatron-LM checkout to look at, instead of an installed megatron-core"),
    switch="--cp-comm-type burst (Megatron; `SCRIPT --help` lists the --burst-* flags)",
    words=("megatron", "--cp-comm-type"),
    checkout="Megatron-LM",
    written=written,
)
