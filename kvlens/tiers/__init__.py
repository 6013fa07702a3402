"""The two tiers: slots on the device, rows in host memory, and how a run divides them. `kvlens.memory` moves KV between
them."""
