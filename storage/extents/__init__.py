"""The segment files of a store, and which extents of them are free, lent or full."""
