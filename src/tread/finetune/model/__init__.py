"""The released model that is tuned: its files, its quantized weights, the adapters put on it and the files of those.

It imports `tread.data` (checks of stock weights), `tread.attach`, `tread.kernels` and `tread.errors`; of
`tread.finetune` the settings and the family that an existing adapter is read for, nothing that trains.
"""
