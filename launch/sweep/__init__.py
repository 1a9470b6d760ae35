"""Several runs by one command: seeds, grids of settings, and the jobs that `bench learning` uses, too."""
