"""Flags and gin: from a command line to a locked configuration, with errors that teach."""
