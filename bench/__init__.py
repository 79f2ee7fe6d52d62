"""Benchmarks: ratios measured within one run, never times compared across runs."""
