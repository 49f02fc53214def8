"""Comparison: runs side by side; what differs in their configurations, numbers and costs."""
