"""The messages of the worker: those of the engine and those of operators; only their shapes."""
