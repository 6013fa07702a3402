"""How the papers of built-in methods measure quality: one module per method, found by the method's name."""
