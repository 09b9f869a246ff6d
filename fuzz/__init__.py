"""`python -m fuzz`: mutated files for every reader; nothing but our errors may come out, soon and in few words."""
