"""`hephaestus bench learning`: the agents on a suite of environments, one configuration for all."""
