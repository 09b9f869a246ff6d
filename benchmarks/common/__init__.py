"""Shared by the benchmarks: training steps, timing, FLOP counts and the models that several of them measure."""
