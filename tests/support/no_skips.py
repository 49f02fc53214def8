"""`pytest --no-skips`: a skipped test is a failure, unless it needs a device that is not here."""

import pytest

DEVICE = "needs a device"  # how the reason of a skip begins that is accepted
_skipped = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="fail if a test is skipped")


def pytest_configure(config):
    config.stash[_skipped] = []
    config.pluginmanager.register(_Recorder(config.stash[_skipped]))


class _Recorder:
    """Collects the skips that are not accepted."""

    def __init__(self, skipped):
        self.skipped = skipped

    def take(self, report):
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(DEVICE):
            self.skipped.append(f"{report.nodeid}: {reason}")

    pytest_runtest_logreport = pytest_collectreport = take


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if session.config.getoption("--no-skips") and session.config.stash[_skipped]:
        session.exitstatus = exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    skipped = config.stash[_skipped]
    if config.getoption("--no-skips") and skipped:
        terminalreporter.section("skipped, though they need no device", red=True)
        terminalreporter.write_line("\n".join(skipped))
        terminalreporter.write_line(
            f"{len(skipped)} skipped. Install what they need in .ci/run, or begin the reason with "
            f"{DEVICE!r}."
        )
