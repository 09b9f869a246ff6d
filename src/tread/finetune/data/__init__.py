"""Data of a fine-tune."""
