"""Attention: which kernel computes it, cuDNN's as an operator that is safe in every model, and masks as a bias.

`kernel.py` sets the kernel of the process, `cudnn.py` is the operator, `masks.py` what its masks become. The package
knows no model.
"""
