"""tieredkv inside other programs that serve models; each module imports its program only itself."""
