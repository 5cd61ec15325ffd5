"""Benchmarks: what the cache does on this machine, beside the raw limit of the same run."""
