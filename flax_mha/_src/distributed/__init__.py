"""Splits a call over the devices of a mesh."""
