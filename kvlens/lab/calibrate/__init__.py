"""What some methods need to know of a model before they can run: measured once, kept with its provenance."""
