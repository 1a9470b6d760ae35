"""Replay tables, inspected from outside, and the command that lists environments."""
