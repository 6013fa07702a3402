"""Texts: prompts and their chat form, plain text for pages and terminals, numbers with units in words."""
