"""The folder of a store: its lock, its marker, and what a start does before the index is open."""
