"""Implementations of attention; `shared/head.py` maps those written for one head over batch and heads."""
