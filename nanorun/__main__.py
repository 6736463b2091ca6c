"""`python -m nanorun`: the same program as the `nanorun` command, straight from the tree."""

from nanorun.cli import main

if __name__ == "__main__":
    main()
