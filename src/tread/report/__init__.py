"""What people read: tables, figures and generated pages.

`tread plan`, `tread eval`, `tread families` and `tread doctor` print from here, and `make docs` writes the generated
parts of `configs/` and `docs/`. It may import everything but `cli`.
"""
