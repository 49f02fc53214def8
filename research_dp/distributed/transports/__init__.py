"""Collectives that a platform needs in another form."""
