"""`tread plan MODEL`: the cost of training a model with routes, before anything is loaded.

`models.json` holds the weights, FLOPs and activations counted for each model (by `python -m pages.models`), so nothing
here imports torch. The page that `--html` writes computes with the same file and tables, and the same formulas in
plan.js.
"""
