"""One run on this machine: its flags, checks, nodes and progress."""
