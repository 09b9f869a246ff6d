"""Offloaded layers: frozen weights in host memory, fetched ahead of use into a few slots of device memory."""
