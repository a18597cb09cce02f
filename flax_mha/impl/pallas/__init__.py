"""Attention for TPUs as Pallas kernels that compute every argument: `implementation="pallas"`."""
