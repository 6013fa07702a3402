"""Layer bits on the GPU bench (kvlens/lab/gpu/settings.py): tried with keys of 2 bits, which fit 30 % of a full KV
cache in bf16."""

ON_DEVICE = (({"keys": 2}, 0.0),)
