"""Modules of Flax, Linen and NNX, as pure functions of their parameters."""
