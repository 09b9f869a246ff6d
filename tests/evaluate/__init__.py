"""Tests of `tread.evaluate`; a package, because other folders have files of the same names."""
