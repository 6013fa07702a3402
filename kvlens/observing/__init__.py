"""Runs that kvlens does not steer: a caller's own generation, watched from the attention functions and the cache."""
