"""The dual-timescale competence agent: a world model, dreams in it, an actor-critic on the dreams."""
