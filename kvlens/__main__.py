"""Run the command line: `kvlens`, or python -m kvlens."""

import sys


def main() -> None:
    """Load the commands and run the one that is asked for. Ctrl-C while they are loaded ends with status 130, too."""
    try:
        from kvlens.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("kvlens: stopped.\n")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
