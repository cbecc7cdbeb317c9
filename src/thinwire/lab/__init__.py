"""Programs beside the library: demo, benchmarks, analysis, testbed, studies. The library never imports them."""
