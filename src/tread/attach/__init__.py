"""Routing on unmodified models: `attach`, the wrapper around `forward`, and the families that describe model classes.

A new model class is one file in `families/` and one line in its table. It imports torch, `tread.errors` and
`tread.routing`; model libraries are only ever patched through names that a family declares.
"""
