"""The released model that is tuned: its files, its quantized weights and the adapters put on it.

It imports `tread.data` (checks of stock weights), `tread.attach`, `tread.kernels` and `tread.errors`; nothing else of
`tread.finetune`.
"""
