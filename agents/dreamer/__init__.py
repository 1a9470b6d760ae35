"""The dreamer: a world model with an ensemble, and actors and critics that learn from its imagination."""
