"""By package: tests/planning/test_auto.py tests research_dp/planning/auto.py."""

import pytest

pytest.register_assert_rewrite("tests.support")  # a failing helper shows values, as tests do
