"""The routing core: routes and plans, token selection, the state of a forward, recomputation, and stateless noise.

It knows neither models nor jobs. It imports torch and `tread.errors`, and nothing else; PyYAML only when a plan is
read from a YAML file.
"""
