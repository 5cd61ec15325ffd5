"""The index of a store: its LMDB environment, transactions, entries, and how it is made again."""
