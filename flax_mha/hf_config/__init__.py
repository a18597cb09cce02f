"""What the configs of Hugging Face mean."""
