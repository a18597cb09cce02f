"""Weights and configs of PyTorch and Hugging Face; `flax_mha.convert` lists what users
import.
"""
