"""What a method learns once per model."""
