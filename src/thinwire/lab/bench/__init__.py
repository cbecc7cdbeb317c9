"""Repeatable benchmarks: the workloads, what is timed, and how it is reported."""
