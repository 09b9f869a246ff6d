"""Captioned data."""
