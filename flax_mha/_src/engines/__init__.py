"""Implementations of attention; `math/head.py` maps those written for one head over batch and heads."""
