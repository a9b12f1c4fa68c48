"""Run Megatron-core with gloo on a machine without a GPU: for tests, examples, and debuggers.

Megatron-core asks for CUDA devices by name in many places. `enable()` answers those requests with the CPU, from
outside Megatron's own files, for the whole process::

    from burst_plugin.megatron import cpu

    cpu.enable()                                     # before or after importing megatron.core, see `enable`
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=4)

The scripts of a Megatron-LM checkout, which need a little more, run unmodified as::

    torchrun --nproc-per-node 4 -m burst_plugin.run --cpu Megatron-LM/pretrain_gpt.py \\
        --distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion \\
        --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --num-workers 0 \\
        --context-parallel-size 4 --cp-comm-type burst ...

Importing this package changes nothing. `enable()` cannot be undone within the process. It holds for threads that are
started later, as a server does for requests.
"""

from __future__ import annotations

from burst_plugin.megatron.cpu.redirection import enable, hide_cuda_packages, prepare

__all__ = ["enable", "hide_cuda_packages", "prepare"]
