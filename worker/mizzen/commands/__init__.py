"""The commands of `mizzen`, one module each; `mizzen.cli` ties them together."""
