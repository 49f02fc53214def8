"""What is skipped in CI is counted: .ci/run fails for a test that is skipped without need."""

import subprocess
import sys

import pytest

from tests.support.repository import ROOT

FILE = """
import pytest

def test_passes():
    pass

@pytest.mark.skipif(True, reason="needs a device: a GPU")
def test_needs_a_device():
    pass

def test_is_known_to_fail():
    pytest.xfail("a bug")
"""
SKIPPED = """
@pytest.mark.skipif(True, reason="libtpu is not installed")
def test_by_mark():
    pass

def test_inside():
    pytest.importorskip("no_such_module")
"""
SKIPPED_FILE = "import pytest\n\npytest.skip('not today', allow_module_level=True)\n"


@pytest.mark.parametrize(("count", "workers"), [(0, 0), (3, 2)])
def test_a_skip_without_need_fails_the_run(tmp_path, count, workers):
    (tmp_path / "test_file.py").write_text(FILE + SKIPPED if count else FILE)
    if count:
        (tmp_path / "test_skipped_file.py").write_text(SKIPPED_FILE)
    words = [sys.executable, "-m", "pytest", "-q", "--no-skips", f"-n{workers}"]
    words += ["-p", "tests.support.no_skips"]
    path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=path, capture_output=True, text=True)
    assert done.returncode == (1 if count else 0), done.stdout
    assert (f"{count} skipped. Install what they need" in done.stdout) == bool(count)
    assert "test_needs_a_device: " not in done.stdout
