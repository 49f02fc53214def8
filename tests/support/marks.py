"""Marks of cases of a test."""

import pytest


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)
