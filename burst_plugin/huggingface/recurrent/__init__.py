"""Layers of transformers that carry a state along the sequence: linear attention, Mamba, short convolutions, RWKV.

`families.py` says which layers are known; `functions.py` and `modules.py` have their replacements on shards;
`forward.py` tells layers which shard they have.
"""

from burst_plugin.huggingface.recurrent.families import (
    LAYER_TYPES,
    begin,
    begin_turn,
    end_turn,
    is_mixer,
    is_recurrent_alone,
    mixers,
    problems_of_mixers,
    use_recurrent,
    warn_of_mixing_around,
)

__all__ = [
    "LAYER_TYPES",
    "begin",
    "begin_turn",
    "end_turn",
    "is_mixer",
    "is_recurrent_alone",
    "mixers",
    "problems_of_mixers",
    "use_recurrent",
    "warn_of_mixing_around",
]
