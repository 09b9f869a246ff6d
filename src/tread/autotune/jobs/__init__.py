"""What the tuner needs of a job, and the three of them: `job.py` has the interface, `pretraining.py`, `finetuning.py`
and `own.py`, for a loop of one's own, fill it. `trainer.py` is the loop of the first two. They may import the jobs
themselves and `subject.py`; nothing here measures or chooses.
"""
