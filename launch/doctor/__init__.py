"""Diagnoses of environments and runs that do not learn, for `hephaestus doctor`."""
