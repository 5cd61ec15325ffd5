"""Benchmarks of the cache on this machine, each compared with a raw limit from the same run."""
