"""What people read: tables, help and figures.

`tread plan`, `tread eval`, `tread families` and `tread train --help` print from here. It may import everything but
`cli`.
"""
