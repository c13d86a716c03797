"""Services under change: a load that counts every answer, what happens to them meanwhile, and what is true.

`docs/contributing.md` says how the parts are run: by `make test`, by `make soak`, and by `make e2e`.
"""
