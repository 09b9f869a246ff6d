"""The result of a fine-tune: files that stock code loads, and their model card.

`write` writes the adapter or the weights, `card` the README.md with the code that loads them, and `export` is
`tread export`, which does both from any checkpoint of a run. `write` and `card` may import the settings, the families
and the adapters; only `export`, which loads models as a run does, may import `finetune.run` and `training`.
"""
