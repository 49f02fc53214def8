"""Reads compiled programs: communication, memory, FLOPs and time, on devices present or not."""
