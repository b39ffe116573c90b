"""The command ``isentropic`` as ``python -m isentropic``."""

from isentropic.cli import main

main(prog_name="isentropic")
