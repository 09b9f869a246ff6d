"""Runs as a page: `tread report`, and the `report.html` that a run writes at its end.

What a run left in its folder becomes one self-contained HTML file that reads without scripts: `read.py` reads folders,
`curves.py`, `speed.py`, `kept.py` and `pictures.py` make figures of what they hold, `svg.py` and `png.py` draw figures,
`sections.py` puts them into words and tables, `write.py` fills the template in `assets/`. It may import `training` and
what that may import; no model is built and no data is read, so a run of any job and of any machine can be shown.
"""
