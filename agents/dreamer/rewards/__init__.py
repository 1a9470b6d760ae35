"""Intrinsic rewards of the world-model agent: one file each, and their registry."""
