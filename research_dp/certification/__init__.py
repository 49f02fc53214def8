"""Certifies that a strategy computes what an oracle computes, on the user's configuration."""
