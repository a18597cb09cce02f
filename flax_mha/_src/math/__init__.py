"""The math that engines share: layout of heads, scores, online softmax, tiles, sums
over tiles, derivatives.
"""
