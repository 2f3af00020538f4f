"""`python -m deploy` is `tercet`."""

from deploy.cli import main

main()
