"""Commands of `mizzen`, one module each; `mizzen.cli` registers them."""
