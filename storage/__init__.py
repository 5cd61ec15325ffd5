"""Bytes at rest: the host arena, the block store, its worker. No models, tokens or CUDA here."""
