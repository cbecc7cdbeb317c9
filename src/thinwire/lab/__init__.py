"""Programs beside the library: demo, benchmarks, analysis, testbed and studies. They import the library, never the
reverse."""
