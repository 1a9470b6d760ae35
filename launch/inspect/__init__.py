"""Replay tables and environments, inspected from outside."""
