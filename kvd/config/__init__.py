"""The daemon's configuration: TOML file < KVD_* environment < flags.

`schema` says what there is, `keys` lists it flat, `load` merges and checks, `sizes` and `paths` read their one kind of
value, `reference` writes the page for people. Importing this package loads nothing heavy: the client library needs
`kvd.config.paths`.
"""
