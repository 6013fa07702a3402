"""TurboQuant on the GPU bench (kvlens/lab/gpu/settings.py): tried with 3 bits, which fit 30 % of a full KV cache in
bf16."""

ON_DEVICE = (({"key_bits": 3, "value_bits": 3}, 0.0),)
