"""Offloaded layers: frozen weights in host memory, fetched ahead of use into a few slots of device memory.

`offload.py` puts them on a model, `call.py` is the call of one, `host.py` its memory, `ring.py` the slots. The package
knows neither job nor family, and imports `routing` and its imports.
"""
