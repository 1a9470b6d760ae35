"""Agents: networks, distributions, losses and policies, as pure functions."""
