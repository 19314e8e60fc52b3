"""Says at the end of a run how long each notebook took."""
from collections import Counter

seconds = Counter()


def pytest_runtest_logreport(report):
    file = report.nodeid.partition("::")[0]
    if file.endswith(".ipynb"):
        seconds[file] += report.duration


def pytest_terminal_summary(terminalreporter):
    if seconds:
        terminalreporter.section("seconds per notebook")
        for file, total in sorted(seconds.items()):
            terminalreporter.write_line(f"{total:6.1f}  {file}")
