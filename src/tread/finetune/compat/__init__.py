"""Configs of other trainers, and of earlier versions of this one.

`translate` turns a config into settings of `FinetuneConfig` and gives a verdict on every key; `keys` has the tables
from key to rule, `rules` the rules, `defaults` the options of the existing trainer, `left_out` what its configs leave
to those defaults, `environment` its variables, `formats` the trainers whose configs are not read. Names that only other
trainers use (`int8-torchao`, `optimi-lion`) belong here and nowhere else. Modules here may import `config`,
`routing.plan`, `data.captioned.entries`, `finetune.settings` and the table of families: a config is judged without
opening the model or the data.
"""
