"""What a command of the package does when it is called in the same process."""

from lightning_hetero import cli


def ran(capsys, *arguments):
    """Exit code, output and errors of a command."""
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    written = capsys.readouterr()
    return code, written.out, written.err
