"""What the benchmarks share: steps, clocks, counts and the models that several of them measure."""
