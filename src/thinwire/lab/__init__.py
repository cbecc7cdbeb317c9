"""Beside the library: demo, benchmarks, analysis, testbed and studies. It imports the library, never the reverse."""
