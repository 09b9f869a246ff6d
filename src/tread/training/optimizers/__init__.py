"""Optimizers and the learning rate of each step.

`make` has the table of optimizers and those that are written here, `muon` and `self_tuned` those of torch and of their
authors' libraries that need more than a line, `rates` the schedules. They may import `settings`, and know no loop.
"""
