"""The page Study: its form, a running study, its tables and curves."""
