"""The routing core: routes and plans, token selection, the state of a forward, recomputation, and stateless noise.

It knows neither models nor jobs. It imports torch, `tread.errors` and the reader of JSON and YAML in `tread.config`.
"""
