"""Replay tables and environments, looked at from outside."""
