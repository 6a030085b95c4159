"""The packages that only an extra brings."""

# Import name -> extra; everything else comes with `dg`.
EXTRAS = {
    "curvlinops": "dev",
    "mlflow": "loggers",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "pyhessian": "dev",
    "ray": "ray",
    "tensorboard": "loggers",
    "wandb": "loggers",
}


def missing(error: ModuleNotFoundError) -> str:
    """What to say to a person whose command needs a package that is not there."""
    package = (error.name or "a package").partition(".")[0]
    extra = EXTRAS.get(package, "dg")
    return f"steppe: this command needs {package}: pip install 'steppe[{extra}]'"
