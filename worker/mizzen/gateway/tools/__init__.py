"""Tool calls: schemas and checks of a request's tools, and parsers and grammars of each model family."""
