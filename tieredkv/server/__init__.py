"""HTTP shapes to requests and back; tokenising and templates; the engine's process from outside."""
