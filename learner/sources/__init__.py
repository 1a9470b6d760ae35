"""Sources of batches for the training loop: replay, a queue of on-policy sequences, or unrolls of its own."""
