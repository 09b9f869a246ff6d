"""Is the tuner right? The error of its predicted step times, and the rank correlation of its scores with long runs.

    python -m benchmarks.autotune predict CONFIG [name=value ...] --out FILE   # five plans that were not timed
    python -m benchmarks.autotune gaps CONFIG [name=value ...] --arms benchmarks/results/quality-430s*.json --out GAPS
    python -m benchmarks.autotune rank benchmarks/results/quality-430s*.json [--gaps GAPS] --out FILE
    python -m benchmarks.autotune rank paper --out FILE                        # the twelve arms that the paper ran

`predict` and `gaps` measure on this machine, with a config of `tread train` or `tread finetune`; `rank` computes with
recorded figures. `paper` stands for the paper's arms in `gaps --arms` too. A correlation over few arms proves nothing,
and `rank` says how many there are.
"""
