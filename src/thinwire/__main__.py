"""`python -m thinwire` is the `thinwire` command."""

from thinwire.lab.cli.main import command

command()
