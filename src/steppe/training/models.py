"""Load a run's model, and score it on its targets or on other data."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from steppe.algorithms import Algorithm
from steppe.domains import Domain, Images, dataset_names, import_plugins, load
from steppe.domains.augment import resize
from steppe.domains.batches import Batch, View
from steppe.domains.dataset import Pixels, decode, rgb, with_channels
from steppe.domains.folder import read_domain, read_folder, subfolders
from steppe.domains.store import Host
from steppe.errors import RunError, UserError, shown

from . import checkpoint, setup
from .directory import RunDirectory
from .evaluation import BATCH, EnsembleScores, Scores, Tally
from .processes import find_device
from .served import load_served
from .which import Which

log = logging.getLogger("steppe")

ImageLike = str | os.PathLike[str] | Image.Image | Tensor
"""Images that `TrainedModel.preprocess` accepts; a tensor may hold several."""


class TrainedModel(nn.Module):
    """A run's model, in evaluation mode: maps pixels to logits.

    Its input is what `preprocess` returns: uint8, N x channels x height x width.

    Attributes:
        algorithm: the algorithm that trained it, with the network inside.
        classes: class names, in the order of the logits.
        step: the step after which its weights were saved.
        averaged: whether the weights are an average.
        which: the choice of weights: ``best``, ``last`` or ``step:N``.
        trained_on: names of its training domains.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        classes: tuple[str, ...],
        image_size: int,
        step: int,
        averaged: bool = False,
        which: Which = "last",
        trained_on: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.classes = classes
        self.image_size = image_size
        self.step = step
        self.averaged = averaged
        self.which = which
        self.trained_on = tuple(trained_on)
        self.eval()

    @property
    def channels(self) -> int:
        return self.algorithm.network.mean.numel()

    def forward(self, images: Tensor) -> Tensor:
        return self.algorithm.predict(self.algorithm.network.normalize(images))

    def preprocess(self, *images: ImageLike | Sequence[ImageLike]) -> Tensor:
        """Resize images as in evaluation and stack them, in grayscale if the model needs it.

        Args:
            images: paths, Pillow images, tensors of pixels (uint8, channels x height x width, or
                several as N x channels x height x width), or lists of these.

        Raises:
            UserError: one of them is not an image, or cannot be read.
        """
        require_images(self)
        arrays = [with_channels(array, self.channels) for array in _arrays(images)]
        if not arrays:
            raise UserError("no image to preprocess: pass at least one")
        pixels = np.stack([resize(array, self.image_size) for array in arrays])
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).to(self.algorithm.network.mean.device)


def require_images(model: TrainedModel) -> None:
    """Reject a model whose input is not what image files hold."""
    if model.channels not in (1, 3):
        raise UserError(f"the model takes {model.channels} channels, but image files have 1 or 3")


def _arrays(images: Iterable[object]) -> Iterator[Pixels]:
    for image in images:
        if isinstance(image, str | os.PathLike):
            yield decode(Path(image))
        elif isinstance(image, Image.Image):
            yield rgb(image)
        elif isinstance(image, Tensor):
            yield from _tensor_arrays(image)
        elif isinstance(image, list | tuple):
            yield from _arrays(image)
        else:
            raise UserError(
                f"{shown(image)} is not an image: pass a path, a Pillow image, a tensor of pixels, "
                "or a list of these"
            )


def _tensor_arrays(images: Tensor) -> Iterator[Pixels]:
    if images.dtype is not torch.uint8:
        raise UserError(
            f"preprocess takes uint8 pixels from 0 to 255, but the tensor is {images.dtype}: "
            "convert it, or pass normalized images directly to the model"
        )
    several = images[None] if images.dim() == 3 else images
    if several.dim() != 4 or several.shape[1] not in (1, 3):
        raise UserError(
            f"a tensor of shape {tuple(images.shape)} is not an image: expected 1 or 3 channels x "
            "height x width, or several as N x channels x height x width"
        )
    yield from several.permute(0, 2, 3, 1).cpu().numpy()


def load_model(
    run: str | os.PathLike[str], which: Which | None = None, device: str = "cpu"
) -> TrainedModel:
    """Load the model that a run trained.

    Args:
        run: the run's folder.
        which: ``best`` for the weights of the best record by validation accuracy, ``last`` for
            those after the last step, ``step:N`` for the checkpoint after step N (default:
            ``best``, or ``last`` if the run has no best; the model's ``which`` says which).
        device: where to put the model.

    Raises:
        UserError: the run or the checkpoint does not exist.
        RunError: the checkpoint is damaged; the message lists the intact ones.

    Examples:
        >>> import tempfile
        >>> from steppe.training import make_config, train
        >>> folder = tempfile.mkdtemp()
        >>> config = make_config({"dataset": "RotatedDigits", "targets": "75", "steps": 2})
        >>> records = train(config, folder)
        >>> model = load_model(folder)
        >>> model(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)).shape
        torch.Size([1, 10])
    """
    directory = RunDirectory(Path(run))
    config, data = directory.config(), directory.data()
    import_plugins(config.plugins)
    served = load_served(directory, which)
    start = config.model_copy(update=checkpoint.REPLACES)
    algorithm = setup.build(start, len(data["classes"]), data["channels"], len(data["sources"]))
    try:
        algorithm.load_state_dict(served.tensors)
    except RuntimeError:
        raise RunError(
            f"{served.checkpoint} is not a checkpoint of this run: its weights do not fit "
            f"{config.algorithm.name} with {config.backbone} for {len(data['classes'])} classes"
        ) from None
    model = TrainedModel(
        algorithm,
        tuple(data["classes"]),
        config.image_size,
        served.step,
        served.averaged,
        served.which,
        data["sources"],
    )
    return model.to(find_device(device))


def evaluate_run(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    which: Which | None = None,
    device: str = "auto",
    root: str | None = None,
) -> dict[str, Scores]:
    """Evaluate a run's model on whole domains.

    Args:
        run: the run's folder.
        data: a folder DOMAIN/CLASS/IMAGE or CLASS/IMAGE, or a dataset's name (default: the
            run's own target domains).
        which: ``best``, ``last`` or ``step:N``, as in `load_model`.
        device: where to compute.
        root: the data folder for named datasets.
    """
    found = _evaluate([run], [load_model(run, which, device)], data, root)
    return {domain: scores.members[0] for domain, scores in found.items()}


def evaluate_ensemble(
    runs: Sequence[str | os.PathLike[str]],
    data: str | os.PathLike[str] | None = None,
    *,
    which: Which | None = None,
    device: str = "auto",
    root: str | None = None,
) -> dict[str, EnsembleScores]:
    """Evaluate an ensemble of runs, whose logits are the sum of the members' logits.

    With runs that average their weights (`sma`), this is the ensemble of averages of Arpit et al.
    (NeurIPS 2022). All runs must have the same classes, image size and channels. The arguments are
    those of `evaluate_run`; by default, the data is the targets of the first run.
    """
    if not runs:
        raise UserError("an ensemble needs at least one run: pass their folders")
    models = [load_model(run, which, device) for run in runs]
    _check_ensemble([Path(run) for run in runs], models, data is not None)
    return _evaluate(runs, models, data, root)


def _check_ensemble(runs: Sequence[Path], models: Sequence[TrainedModel], elsewhere: bool) -> None:
    """Reject runs whose logits cannot be summed, or that trained on another run's target."""
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError("the ensemble lists a run twice: list each once")
    configs = [RunDirectory(run).config() for run in runs]
    for run, model, config in zip(runs, models, configs, strict=True):
        if not model.averaged and config.averaging.name != "none":
            log.warning("%s is not finished: its weights are not averaged yet", run)
        for what in ("classes", "image_size", "channels"):
            ours, theirs = getattr(models[0], what), getattr(model, what)
            if ours != theirs:
                raise UserError(
                    f"{run} cannot be in an ensemble with {runs[0]}: different {what} ({theirs} "
                    f"and {ours})"
                )
        if not elsewhere and {*config.targets} != {*configs[0].targets}:
            raise UserError(
                f"{run} held out {', '.join(config.targets)} and {runs[0]} "
                f"{', '.join(configs[0].targets)}: choose runs with the same targets, or pass "
                "--data"
            )


def _evaluate(
    runs: Sequence[str | os.PathLike[str]],
    models: Sequence[TrainedModel],
    data: str | os.PathLike[str] | None,
    root: str | None,
) -> dict[str, EnsembleScores]:
    device = models[0].algorithm.network.mean.device
    results = {}
    for domain, batches in _whole_domains(runs[0], models[0], data, root):
        tallies = [Tally(device) for _ in range(len(models) + 1)]
        for images, labels in batches:
            images, labels = images.to(device), labels.to(device)
            with torch.no_grad():
                logits = [model(images) for model in models]
            for tally, of_one in zip(tallies, (*logits, sum(logits)), strict=True):
                tally.add(of_one, labels)
        *alone, ensemble = (tally.scores() for tally in tallies)
        members = (
            replace(scores, step=model.step, which=model.which)
            for scores, model in zip(alone, models, strict=True)
        )
        results[domain] = EnsembleScores(ensemble, tuple(members))
    return results


def _whole_domains(
    run: str | os.PathLike[str],
    model: TrainedModel,
    data: str | os.PathLike[str] | None,
    root: str | None,
) -> Iterator[tuple[str, Iterator[Batch]]]:
    """Domains to evaluate a model on, each with its images in batches."""
    config, classes = RunDirectory(Path(run)).config(), model.classes
    if data is None:
        dataset = load(config.dataset, root or config.root, packed=config.packed)
        found, domains = dataset.classes, dataset.domains
        domains = tuple(domain for domain in domains if domain.name in config.targets)
    else:
        found, domains = _find(data, classes, root or config.root)
    strange = [name for name in found if name not in classes]
    if strange:
        raise UserError(
            f"the data has classes unknown to the model: {', '.join(strange[:5])}. Known: "
            f"{', '.join(classes[:10])}" + (", ..." if len(classes) > 10 else "")
        )
    to_model = np.array([classes.index(name) for name in found])
    view = View(model.image_size, augment=False)
    for domain in domains:
        channels, images = domain.images[0].shape[2], domain.images
        if (channels, model.channels) == (3, 1):
            images = Seen(images, 1)
        elif channels != model.channels:
            raise UserError(
                f"the images of {domain.name!r} have {channels} channels, but the model takes "
                f"{model.channels}"
            )
        seen = replace(domain, images=images, labels=to_model[domain.labels])
        # Shuffled: files come sorted by class, and some algorithms use statistics of the batch.
        shuffled = np.random.default_rng(0).permutation(len(seen))
        yield domain.name, Host(torch.device("cpu")).evaluation(seen, shuffled, view, BATCH)


def _find(
    data: str | os.PathLike[str], classes: Sequence[str], root: str | None
) -> tuple[tuple[str, ...], tuple[Domain, ...]]:
    """Classes and domains of a dataset, or of a folder with or without domains."""
    name = os.fspath(data)
    if name.lower() in (known.lower() for known in dataset_names()):
        dataset = load(name, root)
        return dataset.classes, dataset.domains
    path = Path(name)
    if not path.is_dir():
        raise UserError(f"{path} is neither a folder nor the name of a dataset")
    below = subfolders(path)
    # A domain's folder contains class folders, even if the domain is named like a class.
    if any(set(subfolders(path / folder)) & set(classes) for folder in below):
        return read_folder(path, below)
    return tuple(below), (read_domain(path, path.resolve().name, below),)


@dataclass(frozen=True)
class Seen:
    """Images converted to the model's number of channels."""

    images: Images
    channels: int

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> Pixels:
        return with_channels(self.images[index], self.channels)

    def name(self, index: int, /) -> str:
        return self.images.name(index)
