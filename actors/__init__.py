"""How experience is made: unrolls of many worlds with one policy, and the nodes that run them."""
