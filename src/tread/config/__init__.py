"""Settings, whatever the job: typed dataclasses that hold the default and the documentation of each field.

`documents` reads JSON and YAML, `fields` lists what a class can be set to, `schema` turns a mapping into a dataclass,
`layers` lays files and `name=value` over each other, `reference` writes the settings down for people. No setting is
known by name here, but for `routes` and `preset`, which replace each other. It may import `errors` and `files` alone.
"""
