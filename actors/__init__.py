"""How experience is made: unrolls of many environments with one policy, and the nodes that run them."""
