"""One program per question; each prints a table. Run as `python -m benchmarks.NAME`."""
