"""Which process runs where, with which numbers."""
