"""Fusewright: do less, then fuse."""
