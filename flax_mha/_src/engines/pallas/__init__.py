"""`implementation="pallas"`: Pallas kernels for TPUs that support nearly every argument."""
