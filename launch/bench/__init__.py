"""Benchmarks: throughput of each part and of a whole run, and learning on a suite of tasks."""
