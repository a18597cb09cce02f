"""Implementations of attention for one head, and the one place where they are lifted over batch and heads."""
