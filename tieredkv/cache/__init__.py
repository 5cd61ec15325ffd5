"""The tiered cache: what is where, what moves, what stays.

The engine uses only `requests.TieredCache`, and for operators `operations.Operations`. The former
admits requests, each with its `chain` and a `row` of what is true of its blocks, which `hits`
fills from what the tiers have. It takes in moves that have ended and starts the next ones:
`promotion` copies blocks to faster tiers, `demotion` copies them to slower ones. `recalls` records
what requests want from slower tiers, and `plan` decides which part of it is computed instead, by
the measured `link_rate` and `compute_rate`. `tiers` has the pools and tells them which blocks are
clean, and the `free_list` of a pool says which one is evicted next, by one of the `orders`.
`presence` is a table of the blocks that the disk has told of; `lookups` asks the disk for others.
`catalog` records the identity and the deadline of each block, and why blocks have left. No module
of this package knows models, or the store of the disk tier.
"""
