"""Exact sums: the same bits on any number of devices."""
