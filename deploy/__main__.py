"""`python -m deploy` is `tercet`."""

from deploy.command_line.cli import main

main()
