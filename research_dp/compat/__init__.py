"""Adapters for people's own modules and training loops, one file a system."""
