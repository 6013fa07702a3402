"""Which models there are and where they lie: names, local folders, GGUF files converted once into the cache. Nothing
here imports torch."""
