"""Throughput of each part, and of all together."""
