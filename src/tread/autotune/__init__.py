"""`tread autotune`: the routes for one model, its data and one device, chosen by measurements.

`cost.py` predicts the time of a step, `sensitivity.py` measures what dropping tokens costs without training,
`rules.py` says which routes may be proposed, `search.py` chooses among them, `verify.py` runs finalists beside dense
training. `subject.py` is the model that is measured; `measure.py` and `store.py` keep each measurement as it is made.
`run.py` is the command, `choose.py` the same for a loop of one's own. It may import both jobs, `page` and `report`;
only the command line imports it, and users `choose_routes`. What a number means on the user's screen is said in
`text.py` and `page.py`, and nowhere else.
"""
