"""What a GPU does: ceilings, kernels, whole decode steps. Needs torch (and Triton on CUDA), nothing of pages or
stores."""
