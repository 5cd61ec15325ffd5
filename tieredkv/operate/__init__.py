"""What operators do with a store: its verbs, and how they are asked for."""
