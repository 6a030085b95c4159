"""`python -m steppe` is `steppe`."""

from steppe.cli import main

if __name__ == "__main__":
    main()
