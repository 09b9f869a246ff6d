"""`tread finetune`: tune a released model with routing.

The job itself is here: its settings (`settings`), how a config becomes them (`config`), the stages of a run (`run`) and
its task in the training loop (`task`); beside them what is trained (`family`, `experts`, `target`, `loss`), previews
and `tread init`. Folders hold the families, the model that is tuned, the data, the result, and configs of other
trainers. Modules here may import `routing`, `attach`, `kernels`, `objectives`, `data`, `config` and `training`; only
`report` and `cli` may import fine-tuning.
"""
