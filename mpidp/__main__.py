"""`python -m mpidp ...` enters, the exit code of the command leaves."""

from mpidp.cli import run

if __name__ == "__main__":
    run()
