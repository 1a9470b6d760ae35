"""What an agent is: networks, distributions, losses and policies, as pure functions."""
