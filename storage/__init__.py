"""Bytes at rest: the block store, its worker process and its client; no models, tokens or CUDA."""
