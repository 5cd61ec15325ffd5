"""The keys of a store: the files that hold them, and what is encrypted under them.

The modules know files of keys and bytes in memory. They know neither the folder of a store nor its
index.
"""
