"""Run the command line: python -m kvlens."""

from kvlens.cli.main import main

if __name__ == "__main__":
    main()
