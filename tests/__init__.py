"""The tests, a package: what they share is imported from the repository's root (`from tests.tiny... import ...`)."""
