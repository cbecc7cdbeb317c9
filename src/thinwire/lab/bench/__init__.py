"""Repeatable benchmarks: workloads, timed runs, and reports."""
