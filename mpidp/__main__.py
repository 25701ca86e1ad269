"""The entry point of `python -m mpidp`; the exit code is that of the command."""

from mpidp.cli import run

if __name__ == "__main__":
    run()
