"""Several runs at a time: seeds, sweeps, and the jobs of `bench learning`."""
