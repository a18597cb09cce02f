"""Reads configs of Hugging Face models, by a table of model families."""
