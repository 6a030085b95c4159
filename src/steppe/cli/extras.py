"""Missing packages, and the extras that install them."""

# Import name -> extra; `dg` installs all others.
EXTRAS = {
    "mlflow": "loggers",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "ray": "ray",
    "tensorboard": "loggers",
    "wandb": "loggers",
}


def missing(error: ModuleNotFoundError) -> str:
    """The message for a command that needs a missing package."""
    package = (error.name or "a package").partition(".")[0]
    extra = EXTRAS.get(package, "dg")
    return f"steppe: this command needs {package}: pip install 'steppe[{extra}]'"
