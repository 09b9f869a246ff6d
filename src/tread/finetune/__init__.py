"""`tread finetune`: tune a released model with routing.

The job itself is here: its settings (`settings`), how a config becomes them (`config`), the stages of a run (`run`) and
its task in the training loop (`task`); beside them what is done to the model (`source`, `quantize`, `adapters`,
`experts`), what is trained (`target`, `family`), previews and `tread init`. Folders hold the families, the data, the
result, and configs of other trainers. Modules here may import `routing`, `attach`, `kernels`, `objectives`, `data`,
`config` and `training`; only `report` and `cli` may import fine-tuning.
"""
