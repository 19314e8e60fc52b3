"""Keeps waiting threads from spinning; says what each notebook took."""
import os
import sys
from collections import Counter

# Kernels and tests inherit it. Threads that wait by spinning keep the one they
# wait for off its core when other work is running: a decode step then takes a
# hundred times as long (2,400 ms instead of 25 on 2 cores with 2 busy loops).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

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
        if sys.platform == "linux":
            import resource  # there is none on Windows; elsewhere it counts bytes

            most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            terminalreporter.write_line(f"{most / 1e9:6.2f}  GB in the largest")
