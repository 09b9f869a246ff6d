"""Offloaded layers: frozen weights in host memory, fetched ahead of use into a few slots of device memory.

`offload.py` puts them on a model; it knows neither job nor family. Imports routing and `around`, nothing else of tread.
"""
