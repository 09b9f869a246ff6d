"""Settings, whatever the job: typed dataclasses that hold the default and the documentation of each field.

`documents` reads JSON and YAML, `fields` lists the settings of a class, `schema` turns a mapping into a dataclass,
`layers` merges files and `name=value` overrides, `reference` writes commented YAML. No setting is known by name here
except `routes` and `preset`, which replace each other. It may import `errors` and `files` alone.
"""
