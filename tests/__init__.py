"""The tests, as a package: shared builders are imported from the repository's root (`from tests.tiny... import ...`)."""
