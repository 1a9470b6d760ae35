"""How parameters change: train states, updates, checkpoints and publishing."""
