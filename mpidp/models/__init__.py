"""The table of built-in models.

Each model is one file that uses torch and nothing of mpidp, so that it doubles as an example of a plain PyTorch
model. The table holds names instead of functions: looking one up (for `--help`, say) imports no torch.
"""

BUILT_IN: dict[str, str] = {
    "cnn": "mpidp.models.cnn:cnn",
    "mlp": "mpidp.models.mlp:mlp",
    "gpt": "mpidp.models.gpt:gpt",
}
"""Name in a run file -> "module:function"; the function takes the run file's arguments and returns a module."""
