"""What a GPU does: ceilings, kernels, one decode step's attention path. Needs torch (and Triton on CUDA), nothing of
pages or stores."""
