"""`python -m faults`: every job is killed, starved of disk space and robbed of workers, and must come to the same end.

Each case runs one job at tiny size, lets one fault strike at an event that a seed draws, and gives the same command
again until it ends. Its folder must then hold what the undisturbed job leaves, bit for bit. It is SIGKILL that is
tried, not a power cut: what was written before the kill is in the page cache and stays.
"""
