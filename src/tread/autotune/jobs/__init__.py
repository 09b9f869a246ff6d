"""What the tuner needs of a job, and the two jobs: `job.py` has the interface, `pretraining.py` and `finetuning.py`
fill it. They may import the jobs themselves and `subject.py`; nothing here measures or chooses.
"""
