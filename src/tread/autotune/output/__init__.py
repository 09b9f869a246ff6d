"""All text about a tuning's figures: `text.py` has what the command prints, `page.py` the report.

They may import `page` and the figures' own modules; nothing here measures or chooses.
"""
