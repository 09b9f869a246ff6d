"""Sharded training (FSDP2): each process keeps a shard of weights, average and moments, and writes it itself.

`layout` shards a model, `files` reads and writes shards, `saver` writes them in the background. Only `saver` knows
checkpoints, whose manifest and names are those of `training/checkpoint.py`.
"""
