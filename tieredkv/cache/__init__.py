"""The tiered cache: what is where, what moves, what stays.

`tiered.TieredCache` is the engine's one door: it admits requests, each with its `prefix`, takes in
what has arrived and starts what comes next: `promotion` brings blocks up, `demotion` takes them
down. `tiers` has the pools and what may leave them, `catalog` remembers what blocks are, until
when, and why they have gone. None of it knows models.
"""
