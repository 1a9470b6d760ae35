"""Records of the agents, and their presets by machine."""
