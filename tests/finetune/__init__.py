"""Tests of `tread finetune`."""
