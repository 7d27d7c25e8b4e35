"""`python -m usp.cli`, which is how torchrun starts a command."""

from usp.cli.app import main

main()
