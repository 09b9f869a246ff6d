"""`python -m tread` and `accelerate launch -m tread` are the command `tread`."""

from tread.cli import main

if __name__ == "__main__":
    main()
