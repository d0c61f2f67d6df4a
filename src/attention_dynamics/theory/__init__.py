r"""Constants, bounds, transport maps and linearisation of the shallow Transformer."""
