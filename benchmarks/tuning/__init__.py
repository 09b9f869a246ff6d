"""Is a routed LoRA better after the same minutes? A small FLUX is tuned on classes it never saw, by the clock.

FLUX's own architecture is trained from scratch, dense, on eight classes of CIFAR-10 at one token per pixel, with class
names as captions, then tuned on the other two: LoRA or all weights, dense or routed, each for the same seconds of a
plain loop with `tread.attach(...).compile()`. Judged on the test images of the two classes, by the dense validation
loss and by Frechet and kernel distances of samples.

    python -m benchmarks.quality prepare PARTS --work WORK                     # the images
    cp efficientnet_lite0.safetensors WORK/extractor.safetensors               # judges samples
    python -m benchmarks.tuning captions WORDLLAMA WORK/captions.safetensors   # 92 KB; WORDLLAMA stays where it is
    python -m benchmarks.tuning run --work WORK --seeds 0 --rates 1e-3 3e-3 3e-4 --guidance   # until all is done
    python -m benchmarks.tuning run --work WORK --seeds 1 2 3 --rates best --chosen-by RESULTS/tuning-s0.json
    python -m benchmarks.tuning choose --work WORK                             # the window of the tuner: arm `chosen`
    python -m benchmarks.tuning report --samples RESULTS                       # docs/results.md, of the results kept

Seed 0 chooses each arm's rate, by loss; the claim is that of the other seeds, which tune the same base with data,
noise, times and dropped tokens of their own. All arms are trained on one machine. The base and results stay in WORK and
RESULTS between calls, every run is on disk when it is done, and none is begun that does not fit into
`--budget-seconds`. `--plan` says how long everything takes. `run --rehearse` in a second process, while the base
trains, compiles what the arms will need. `--smoke` makes everything tiny, for a CPU.
"""
