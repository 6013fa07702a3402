"""python -m kvlens"""

from kvlens.cli import main

if __name__ == "__main__":
    main()
