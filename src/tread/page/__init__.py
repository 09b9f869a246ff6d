"""Runs as a page: `tread report`, and the `report.html` that a run writes at its end.

The files in a run's folder become one self-contained HTML file that is readable without scripts: `read.py` reads
folders, `curves.py`, `speed.py`, `kept.py` and `pictures.py` make figures of them, `svg.py` and `png.py` draw figures,
`sections.py` adds text and tables, `write.py` fills the template in `assets/`. It may import `training` and what that
may import; no model is built and no data is read, so a run of any job and any machine can be shown.
"""
