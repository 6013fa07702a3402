"""Placement, recalls, evictions and zones: the only code that moves KV between the tiers (`kvlens.tiers`)."""
