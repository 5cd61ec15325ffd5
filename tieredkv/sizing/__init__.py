"""What a cache of given sizes would have found: recorded requests, replayed without an engine."""
