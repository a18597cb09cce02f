"""Fused kernels of other projects: cuDNN's and splash."""
