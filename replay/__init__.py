"""Replay: strata of sequences, their writer, reader and inspector, and acting parameters."""
