"""The lens: what a method lost against full KV, why, and what would have saved it."""
