"""Models, requests, scheduling, batches and sampling; it does not know where absent blocks come from."""
