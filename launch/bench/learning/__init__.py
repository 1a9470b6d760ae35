"""`hephaestus bench learning`: trains agents on a suite of environments with one config for all."""
