"""`tread train`: a class-conditional DiT from scratch, and `tread sample`, which draws from its runs.

It has the settings and how they are composed, the task that the loop trains, and evaluation inside a run. It may import
everything but `finetune`, `report` and `cli`.
"""
