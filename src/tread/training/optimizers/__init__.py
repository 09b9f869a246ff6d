"""Optimizers, the learning rate of each step, and the moving average of the weights.

`make` has the table of optimizers; those that need more than a line have a file each. `rates` has the schedules, `ema`
the average. Nothing here knows the loop; `settings` may be imported.
"""
