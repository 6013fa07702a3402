"""DuoAttention: retrieval heads keep everything, streaming heads first and newest tokens (Xiao et al., ICLR 2025)."""
