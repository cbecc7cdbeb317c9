"""`python -m thinwire` is the `thinwire` command."""

from thinwire.cli.main import command

command()
