"""The program that all commands belong to, and options that several of them have."""

import click

with_speed = click.option(
    "--rows-per-second", type=click.FloatRange(min=0, min_open=True), help="Go no faster."
)
with_dry_run = click.option("--dry-run", is_flag=True, help="Only say what would be done.")


@click.group()
@click.version_option(package_name="adk-secure-sessions")
def main() -> None:
    """Look after databases of encrypted sessions.

    Exit status: 0 all is well, 1 something is bad or left to do, 2 wrong use, key or
    configuration.
    """
