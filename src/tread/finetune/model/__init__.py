"""The released model that is tuned: its files, quantization, adapters and adapter files.

Modules here import `tread.data` (checks of stock weights), `tread.attach`, `tread.kernels`, `tread.errors` and the
memory and sharding helpers of `tread.training`; from `tread.finetune` only settings, job and families.
"""
