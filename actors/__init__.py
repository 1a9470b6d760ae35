"""Experience: unrolls of parallel environments with one policy, and the nodes that run them."""
