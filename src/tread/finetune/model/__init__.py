"""The released model that is tuned: its files, quantization, adapters and adapter files.

Modules here import `tread.data` (checks of stock weights), `tread.attach`, `tread.kernels` and `tread.errors`; from
`tread.finetune` only the settings and the families, no training code.
"""
