"""The Python interface: `hephaestus.train`, `Run`, `load`, `Policy` and `export`."""
