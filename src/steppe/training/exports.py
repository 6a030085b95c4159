"""A run's network in one file that other programs load; the file's ending chooses the format."""

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
from .models import TrainedModel, load_model
from .which import Which

EXTRA_FILE = "steppe.json"
"""Where a ``.pt2`` file has what is needed to use it."""
Metadata = Mapping[str, str]


@dataclass(frozen=True)
class Format:
    """A kind of file: what its network takes, and how it is made."""

    takes: str
    write: Callable[[TrainedModel, RunConfig, Metadata], bytes]


def export_run(
    run: str | os.PathLike[str], out: str | os.PathLike[str], which: Which | None = None
) -> dict[str, str]:
    """Write a run's network as one file, in the format that its ending names.

    ``.safetensors`` has the weights, under the backbone library's own names:
    ``timm.create_model(name, num_classes=...)`` or torchvision's constructor loads them with
    ``load_state_dict``. ``.pt2`` (`torch.export`) and ``.onnx`` (needs the extra ``onnx``) have the
    whole network, normalization included: they take pixels as uint8, N x channels x size x size,
    for any N, and give logits.

    Args:
        run: the run's folder.
        out: the file to write.
        which: ``best``, ``last`` or ``step:N``, as in `load_model`.

    Returns:
        What is needed to use the file, and where it comes from: classes, preprocessing, the step,
        the training domains and the config. It is also inside the file: in the metadata of
        safetensors and ONNX, and in ``steppe.json`` among the extra files of a ``.pt2``.

    Raises:
        UserError: the ending is unknown, or the network cannot be written so.
    """
    path = Path(out)
    form = FORMATS.get(path.suffix.lower())
    if form is None:
        raise UserError(
            f"{path} cannot be exported: its ending must be one of {', '.join(FORMATS)}"
        )
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}")
    if form.write is _onnx:
        import onnxscript  # noqa: F401  (an extra brings it: found out before the work)
    model, config = load_model(run, which), RunDirectory(Path(run)).config()
    if type(model.algorithm).predict is not Algorithm.predict:
        raise UserError(
            f"{os.fspath(run)} cannot be exported: {config.algorithm.name} predicts with more than "
            "its network. Use it with steppe.training.load_model."
        )
    metadata = {**_metadata(model, config), "input": form.takes}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    data = form.write(model, config, metadata)
    try:
        replace(path, data)
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror}") from None
    return metadata


def _metadata(model: TrainedModel, config: RunConfig) -> dict[str, str]:
    network = model.algorithm.network
    # Without where things lie on this machine; a plugin may lie here alone.
    public = config.model_dump(mode="json", exclude={*keys(MACHINE), "plugins"})
    public |= {key: Path(public[key]).name for key in ("dataset", "weights")}
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
    assert made is not None  # what dynamo=True returns
    made.model.metadata_props.update(metadata)
    data: bytes = made.model_proto.SerializeToString()
    return data


def _program(model: TrainedModel, config: RunConfig) -> torch.export.ExportedProgram:
    """The model as a graph for batches of any size, without the paths of this machine."""
    size = config.image_size
    # Two images: the tracer would take one for a constant.
    example = torch.zeros(2, model.channels, size, size, dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad(), _explained(config):
        program = torch.export.export(model, (example,), dynamic_shapes=({0: batch},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


@contextmanager
def _explained(config: RunConfig) -> Iterator[None]:
    """Tells of a network that torch's exporters do not manage."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # all that they raise on purpose
        raise UserError(
            f"the network {config.backbone!r} cannot be written as a graph: "
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
"""By the ending of the file."""
