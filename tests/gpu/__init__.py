"""What only a GPU shows, in functions that run at tiny size on the CPU too."""
