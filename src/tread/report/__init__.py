"""What people read: tables and help.

`tread plan`, `tread eval`, `tread families`, `tread doctor` and `tread train --help` print from here. It may import
everything but `cli`.
"""
