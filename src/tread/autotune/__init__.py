"""`tread autotune`: the routes for one model, its data and one device, chosen by measurements.

`cost.py` predicts the time of a step, `sensitivity.py` measures how much dropping tokens raises the loss without
training, `rules.py` limits the routes that may be proposed, `search.py` orders them, `finalists.py` measures the best
as wholes, `verify.py` trains these and a dense baseline. `subject.py` is the model under measurement; `measure.py`
takes measurements, `store.py` saves each at once. `run.py` is the command, `choose.py` the same for a custom training
loop; `tuning.py` has the stages of both. It may import both jobs, `page` and `report`; only the command line imports
it, and users `choose_routes`. All text about figures is in `output/`.
"""
