"""Proves that a strategy computes what an oracle computes, on a configuration of the user's own."""
