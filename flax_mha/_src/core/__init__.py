"""Basics that all other folders use: checks of values, positions and tiles, tracing,
user functions.
"""
