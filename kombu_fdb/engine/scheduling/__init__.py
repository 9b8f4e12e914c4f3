"""Whose turn it is: fair keys, weights, limits, rates, ageing, single active consumers."""
