"""The folder of a run: the names and formats of its files, and what writes and reads them."""
