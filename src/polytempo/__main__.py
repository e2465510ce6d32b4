"""`python -m polytempo`."""

from polytempo.cli import main

main()
