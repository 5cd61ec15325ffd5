"""Triton kernels with their torch references, and pinned copies; it knows no requests or hashes."""
