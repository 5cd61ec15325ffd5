"""The keys of a store: the files that hold them, what is encrypted under them, and when they go.

The files lie in a folder of keys, which may serve many stores.
"""
