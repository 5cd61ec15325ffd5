"""`python -m tieredkv` is the command line."""

from tieredkv.cli import run

if __name__ == "__main__":
    run()
