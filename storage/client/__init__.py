"""What the process of the engine has of the disk: the protocol of a tier, and its client."""
