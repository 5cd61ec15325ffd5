"""Models, requests, scheduling, batches and sampling; not where absent blocks come from."""
