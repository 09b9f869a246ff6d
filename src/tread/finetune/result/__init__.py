"""The result of a fine-tune: files that stock code loads, and their model card.

`write` writes the adapter or the weights, `layout` a LoRA under other programs' names, `card` the README.md with the
code that loads them, and `export` is `tread export`, which does all of it for any checkpoint of a run. They may import
the settings, the families and the adapters; only `export`, which loads models as a run does, may import `finetune.run`
and `training`.
"""
