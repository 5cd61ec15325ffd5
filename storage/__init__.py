"""Bytes at rest: the host arena, the block store and its worker; it knows no models, tokens or CUDA."""
