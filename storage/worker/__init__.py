"""The worker process, which alone opens a store: it serves the engine and operators."""
