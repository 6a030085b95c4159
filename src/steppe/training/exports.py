"""Export a run's network as one file for other programs; the suffix chooses the format."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from steppe import __version__
from steppe.algorithms import Algorithm
from steppe.durable import replace
from steppe.errors import UserError, reason

from .backbones import library_state
from .config import MACHINE, RunConfig, keys
from .directory import RunDirectory
from .lora import merge_lora
from .models import TrainedModel, load_model
from .which import Which

EXTRA_FILE = "steppe.json"
"""Name of the metadata among the extra files of a ``.pt2``."""
Metadata = Mapping[str, str]


@dataclass(frozen=True)
class Format:
    """A file format: the input that its network takes, and the function that writes it."""

    takes: str
    write: Callable[[TrainedModel, RunConfig, Metadata], bytes]


def export_run(
    run: str | os.PathLike[str], out: str | os.PathLike[str], which: Which | None = None
) -> dict[str, str]:
    """Export a run's network as one file, in the format of its suffix.

    ``.safetensors`` holds the weights under the backbone library's own names:
    ``timm.create_model(name, num_classes=...)`` or torchvision's constructor loads them with
    ``load_state_dict``. ``.pt2`` (`torch.export`) and ``.onnx`` (needs the extra ``onnx``) hold the
    whole network, normalization included: they take uint8 pixels, N x channels x size x size for
    any N, and return logits. These also hold what DMG and DSON add to the network.

    Args:
        run: the run's folder.
        out: the file to write.
        which: ``best``, ``last`` or ``step:N``, as in `load_model`.

    Returns:
        The file's metadata: classes, preprocessing, step, training domains and config. It is also
        in the file: as metadata of safetensors and ONNX, and in ``steppe.json`` among the extra
        files of a ``.pt2``.

    Raises:
        UserError: the suffix is unknown, or the network does not fit the format.
    """
    path = Path(out)
    form = format_of(path)
    if not path.parent.is_dir():
        raise UserError(f"cannot export to {path}: there is no folder {path.parent}")
    if form.write is _onnx:
        import onnxscript  # noqa: F401  (fails before the work if the extra is missing)
    model, config = load_model(run, which), RunDirectory(Path(run)).config()
    algorithm = model.algorithm
    mixes = algorithm.mixes_images()
    weights_only = form.write is _safetensors
    if mixes or (weights_only and type(algorithm).predict is not Algorithm.predict):
        instead = (
            "Use it with steppe.training.load_model" if mixes else "Export it as .pt2 or .onnx"
        )
        raise UserError(
            f"cannot export {os.fspath(run)}: {config.algorithm.name} needs more than its network "
            f"to predict. {instead}."
        )
    merge_lora(model.algorithm)
    metadata = {**_metadata(model, config), "input": form.takes}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    data = form.write(model, config, metadata)
    try:
        replace(path, data)
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror}") from None
    return metadata


def format_of(path: Path) -> Format:
    """Return the format of a file's suffix."""
    form = FORMATS.get(path.suffix.lower())
    if form is None:
        raise UserError(f"cannot export to {path}: its suffix must be one of {', '.join(FORMATS)}")
    return form


def _metadata(model: TrainedModel, config: RunConfig) -> dict[str, str]:
    network = model.algorithm.network
    # Without this machine's paths; plugins may exist only here.
    public = config.model_dump(mode="json", exclude={*keys(MACHINE), "plugins", "merged_from"})
    paths = ("dataset", "weights", "class_embeddings")
    public |= {key: Path(public[key]).name for key in paths}
    return {
        "backbone": config.backbone,
        "classes": json.dumps(model.classes),
        "image_size": str(config.image_size),
        "step": str(model.step),
        "which": model.which,
        "averaging": config.averaging.name if model.averaged else "none",
        "mean": json.dumps(network.mean.flatten().tolist()),
        "std": json.dumps(network.std.flatten().tolist()),
        "trained_on": json.dumps(model.trained_on),
        "config": json.dumps(public),
        "steppe": __version__,
    }


def _safetensors(model: TrainedModel, config: RunConfig, metadata: Metadata) -> bytes:
    weights = library_state(config.backbone, model.algorithm.network, config.image_size)
    plain = {name: value.contiguous().clone() for name, value in weights.items()}
    return save(plain, metadata=dict(metadata))


def _pt2(model: TrainedModel, config: RunConfig, metadata: Metadata) -> bytes:
    file = io.BytesIO()
    extra = {EXTRA_FILE: json.dumps(dict(metadata), indent=2)}
    torch.export.save(_program(model, config), file, extra_files=extra)
    return file.getvalue()


def _onnx(model: TrainedModel, config: RunConfig, metadata: Metadata) -> bytes:
    program = _program(model, config)
    with _explained(config):
        made = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=["pixels"], output_names=["logits"]
        )
    assert made is not None  # with dynamo=True
    for value in (*made.model.graph.inputs, *made.model.graph.outputs):
        assert value.shape is not None
        value.shape[0] = "batch"  # torch names it after its own symbol
    made.model.metadata_props.update(metadata)
    data: bytes = made.model_proto.SerializeToString()
    return data


def _program(model: TrainedModel, config: RunConfig) -> torch.export.ExportedProgram:
    """Trace the model for any batch size, without this machine's paths."""
    size = config.image_size
    # Two images, because the tracer specializes a batch of one.
    example = torch.zeros(2, model.channels, size, size, dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad(), _explained(config):
        program = torch.export.export(model, (example,), dynamic_shapes=({0: batch},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


@contextmanager
def _explained(config: RunConfig) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # what torch's exporters raise on purpose
        raise UserError(
            f"the network {config.backbone!r} cannot be exported as a graph: "
            f"{reason(error)[:200]}. Export it as .safetensors."
        ) from error


_IMAGE = "the whole image resized to image_size x image_size (bilinear), RGB or gray"
_PIXELS = f"uint8, N x channels x height x width: {_IMAGE}, 0 to 255; it is normalized inside"
FORMATS = {
    ".safetensors": Format(
        f"float32, N x channels x height x width: {_IMAGE}, 0 to 1, minus mean, divided by std",
        _safetensors,
    ),
    ".pt2": Format(_PIXELS, _pt2),
    ".onnx": Format(_PIXELS, _onnx),
}
"""By file suffix."""
