"""Captioned images and clips for fine-tuning: data entries, the list of samples, aspect buckets, pixels and masks.

What depends on a model (latents, text embeddings, their cache) belongs to `tread.finetune.data`. It imports
`tread.data`, `tread.routing` (noise), `tread.files` and `tread.errors`.
"""
