"""Distributed world-model reinforcement learning: JAX actors, Reverb replay, a pmapped learner.

This folder is the package: setuptools installs it as `hephaestus` and each folder beside this file
as a sub-package, so `agents/dreamer/dream.py` is `hephaestus.agents.dreamer.dream`.
"""
