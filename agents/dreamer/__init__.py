"""The dual-timescale competence agent: a world model and an actor-critic trained in imagination."""
