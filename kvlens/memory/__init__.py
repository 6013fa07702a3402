"""What a run holds on the device and in host memory: placement, recalls, evictions, zones, holds, drops. The only place
where KV moves; the tiers in which it lies are in `kvlens.tiers`."""
