"""The folder of a run: its config and metrics, and the readers of both."""
