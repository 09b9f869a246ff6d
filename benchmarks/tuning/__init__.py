"""Is a routed LoRA better after the same minutes? A small FLUX is tuned on classes it never saw, by the clock.

FLUX's own architecture is trained from scratch, dense, on eight classes of CIFAR-10 at one token per pixel, with class
names as captions, then tuned on the other two: LoRA or all weights, dense or routed, each for the same seconds of a
plain loop with `tread.attach(...).compile()`. Judged on the test images of the two classes, by the dense validation
loss and by Frechet and kernel distances of samples.

    python -m benchmarks.quality prepare PARTS --work WORK --weights efficientnet_lite0.safetensors   # the images
    python -m benchmarks.tuning captions WORDLLAMA WORK/captions.safetensors
    python -m benchmarks.tuning run --work WORK --seed 0 --rates 3e-4 1e-3 3e-3    # repeat until all arms are done
    python -m benchmarks.tuning report RESULTS.json [...]

Seed 0 chooses each arm's rate; the claim is that of the other seeds, at `--rates best --chosen-by RESULTS.json`. The
base and the arms of a seed are trained on one machine. `--smoke` makes everything tiny, for a CPU.
"""
