"""Marks of cases of a test."""

import pytest


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)
