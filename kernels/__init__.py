"""Triton kernels with torch references, and pinned copies; no requests or hashes are known here."""
