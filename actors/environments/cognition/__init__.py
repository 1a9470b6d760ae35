"""Environments that test one part of `agents/cognition` each."""
