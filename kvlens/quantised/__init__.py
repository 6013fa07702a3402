"""Tokens in few bits: the form of their codes, the codes of keys and values, and the errors of what they restore."""
