"""Optimizers, the learning rate of each step, and the moving average of the weights.

`make` has the table of optimizers and those that are written here, `muon` and `self_tuned` those of torch and of their
authors' libraries that need more than a line, `rates` the schedules, `ema` the average. They may import
`settings`, and know no loop.
"""
