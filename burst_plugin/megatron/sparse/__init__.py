"""Megatron's DeepSeek Sparse Attention (`experimental_attention_variant="dsa"`) on a ring."""
