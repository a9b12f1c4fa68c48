"""Selective activation checkpointing (`torch.utils.checkpoint.create_selective_checkpoint_contexts`) around a ring.

It notes every operation of the forward pass, keeps what the policy says, and expects the same operations again when
the layer is recomputed. A ring does not make the same ones twice: its buffers may be there already, and ranks compare
notes at some calls only. And it sums up into what a kernel returned, which a policy may have kept. So it is hidden:
attention is recomputed as a whole, or not at all (see `kept_attention`). The modes: `torch/utils/checkpoint.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = ["unseen_by_selective_checkpoints"]

_MODES = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


def unseen_by_selective_checkpoints() -> AbstractContextManager[object]:
    """Return a context that hides operations from all modes that watch them, if one is a selective checkpoint's."""
    if not torch._C._len_torch_dispatch_stack():  # which is asked at every call
        return nullcontext()
    if not any(isinstance(mode, _MODES) for mode in _get_current_dispatch_mode_stack()):
        return nullcontext()
    hidden: AbstractContextManager[object] = _disable_current_modes()
    return hidden
