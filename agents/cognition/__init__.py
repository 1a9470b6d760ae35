"""Parts of cognition that plug into the dreamer's sockets: memory, slots, workspace, intrinsic rewards."""
