"""Routing on unmodified models: `attach`, the wrapper around `forward`, and the families that describe model classes.

A new model class is one file in `families/`, which needs no registration. The package imports torch, `routing` and
`kernels`; model libraries are only ever patched through names that a family declares.
"""
