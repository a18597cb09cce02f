"""`implementation="cudnn"`: NVIDIA's fused attention."""
