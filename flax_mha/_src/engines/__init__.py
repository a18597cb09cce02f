"""The engines: implementations of attention. Most compute one head, and `math/head.py`
maps them over all heads.
"""
