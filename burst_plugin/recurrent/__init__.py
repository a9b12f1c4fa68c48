"""Recurrent and linear layers over the ranks of a ring, which exchange the states that enter their tokens."""

from __future__ import annotations

from burst_plugin.recurrent.layers import affine_scan as affine_scan
from burst_plugin.recurrent.layers import causal_convolution as causal_convolution
from burst_plugin.recurrent.layers import decay_attention as decay_attention
from burst_plugin.recurrent.layers import gated_delta_rule as gated_delta_rule
from burst_plugin.recurrent.layers import mlstm as mlstm
from burst_plugin.recurrent.layers import rwkv as rwkv
from burst_plugin.recurrent.layers import selective_scan as selective_scan
from burst_plugin.recurrent.layers import state_space as state_space
from burst_plugin.recurrent.layers import with_tokens_before as with_tokens_before
from burst_plugin.recurrent.placement import Placement as Placement
