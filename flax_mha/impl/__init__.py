"""Implementations of attention for one head, and the one place where they are mapped over batch and heads."""
