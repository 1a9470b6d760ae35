"""One run on this machine: its folder, its processes and who keeps them alive."""
