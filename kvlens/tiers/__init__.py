"""The two tiers: slots of the device and rows of host memory, and how a run divides them. What moves KV between them is
in `kvlens.memory`."""
