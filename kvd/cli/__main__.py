"""`python -m kvd.cli` is `kvd`."""

from kvd.cli import main

main()
