"""Text output for people: tables and help.

`tread plan`, `tread eval`, `tread families`, `tread doctor` and `tread train --help` print from here. The page of
`tread report` is in `page`, which trainers use too. It may import everything but `cli`.
"""
