"""`python -m tierd` is the `tierd` command."""

from tierd.cli.main import main

if __name__ == "__main__":
    main()
