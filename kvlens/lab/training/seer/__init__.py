"""Training of SeerAttention-R's gate: the model stays as it is, small projections learn its attention by blocks."""
