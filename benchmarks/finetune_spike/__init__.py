"""What routing costs a fine-tune: the loss spike, its length, the dense loss at the end, the time.

A small model of FLUX's architecture is trained from scratch on captioned emoji, then tuned on two groups of emoji that
it never saw, by LoRA and with all weights, dense and routed. Everything is trained by `tread.finetune` itself.

    python -m benchmarks.finetune_spike prepare DATA OUT      # the pipeline without its transformer, and the images
    python -m benchmarks.finetune_spike run OUT               # repeat until it says that all arms are done
    python -m benchmarks.finetune_spike report OUT/results    # the figures, from what `run` left there
    python -m benchmarks.finetune_spike config OUT            # OUT/config.json, for `benchmarks.autotune predict`

`run` needs nothing but OUT and takes about a quarter of an hour on one H200; OUT/results is small, and all that
`report` reads. `prepare --smoke` makes everything tiny, for a CPU.
"""
