"""Context modules: summaries of earlier steps, a file each."""
