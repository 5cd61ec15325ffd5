"""Bytes at rest: the host arena, the block store, its worker; no models, tokens or CUDA here."""
