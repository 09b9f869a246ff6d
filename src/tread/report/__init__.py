"""What people read: tables, figures and generated pages.

`tread plan`, `tread eval` and `tread families` print from here, and `make docs` writes the generated parts of
`configs/` and `docs/`. It may import everything but `cli`.
"""
