"""Published checkpoints in and out: a map of names and layouts for each family, used in both directions.

`model.hub.load.load(folder, mesh)` reads a Hugging Face folder into sharded parameters, `model.hub.save.save(...)` writes one;
`python -m model.hub` inspects, converts and verifies folders. A family is one file in `families/`.
"""
