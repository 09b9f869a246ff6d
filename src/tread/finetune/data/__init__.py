"""The data of a fine-tune: encoded once into a cache on disk, then read by the training loop.

`prepare` runs the stages, `encode` fills the cache, `cache` stores and reads items, `hashes` names them, and `picks`
chooses the samples of each step. Finding and decoding files is `tread.data.captioned`. Modules here may import
`tread.data`, `tread.routing.noise`, `finetune.settings`, `finetune.model.source` and `finetune.family`, but no training
code.
"""
