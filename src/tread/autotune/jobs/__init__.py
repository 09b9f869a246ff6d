"""The jobs that can be tuned: `job.py` has the interface; `pretraining.py`, `finetuning.py` and `own.py`, for a custom
training loop, implement it. `trainer.py` is the loop of the first two. They may import the jobs themselves and
`subject.py`; nothing here measures or chooses.
"""
