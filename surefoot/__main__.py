"""`python -m surefoot` is the `surefoot` command."""

from surefoot.cli.main import main

main()
