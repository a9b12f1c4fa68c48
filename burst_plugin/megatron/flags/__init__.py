"""This package's flags, and checks of Megatron's own flags and TransformerConfig."""
