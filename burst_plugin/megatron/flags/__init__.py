"""Flags: those of this package, and what Megatron's own flags and TransformerConfig ask for."""
