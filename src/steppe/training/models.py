"""What a finished run is good for: its model, and its scores on other data."""

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
from .which import Which, chosen_step

log = logging.getLogger("steppe")

ImageLike = str | os.PathLike[str] | Image.Image | Tensor
"""What `TrainedModel.preprocess` takes as an image; a tensor may also be several."""


class TrainedModel(nn.Module):
    """A run's model, in evaluation mode.

    Takes pixels as uint8, N x channels x height x width, or what `preprocess` returns, and gives
    logits.

    Attributes:
        algorithm: the algorithm that trained it, with the network inside.
        classes: the class names, in the order of the logits.
        step: the step after which its weights were saved.
        averaged: whether they are an average.
        which: the choice that they are: ``best``, ``last`` or ``step:N``.
        trained_on: the names of the domains that it was trained on.
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
        """Images as one batch, resized as in evaluation; in gray if the model was trained so.

        Args:
            images: paths, Pillow images, tensors of pixels (uint8, channels x height x width, or
                several as N x channels x height x width), or lists of these.

        Raises:
            UserError: one of them is not an image, or cannot be read.
        """
        if self.channels not in (1, 3):
            raise UserError(f"the model takes {self.channels} channels, which no image file has")
        arrays = [with_channels(array, self.channels) for array in _arrays(images)]
        if not arrays:
            raise UserError("there is no image to preprocess: give at least one")
        pixels = np.stack([resize(array, self.image_size) for array in arrays])
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).to(self.algorithm.network.mean.device)


def _arrays(images: Iterable[object]) -> Iterator[Pixels]:
    """The pixels of images in any of the forms that `preprocess` takes."""
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
                f"{shown(image)} is not an image: give a path, a Pillow image, a tensor of pixels, "
                "or a list of these"
            )


def _tensor_arrays(images: Tensor) -> Iterator[Pixels]:
    if images.dtype is not torch.uint8:
        raise UserError(
            f"preprocess takes pixels as uint8 from 0 to 255, and the tensor is {images.dtype}: "
            "convert it, or give the model itself what is normalized already"
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
        which: ``best``, the weights of the best record by validation accuracy; ``last``, those
            after the last step; or ``step:N``, those of the checkpoint after step N (default:
            ``best``, or ``last`` where a run has no best; the model's ``which`` says so).
        device: where to put it.

    Raises:
        UserError: there is no such run, or no such checkpoint.
        RunError: the checkpoint is damaged; says which ones are whole.

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
    import_plugins(config.plugins)  # they know names of algorithms and datasets
    if which is None:
        which = "best" if (directory.checkpoints / "best").exists() else "last"
    found = _checkpoint(directory, which)
    # The weights of the file replace those it was begun with.
    start = config.model_copy(update={"weights": "none"})
    algorithm = setup.build(start, len(data["classes"]), data["channels"], len(data["sources"]))
    # What a run goes on from is not what it predicts with, where weights are averaged. What was
    # validated best is: only averages are candidates then.
    served = found.state.get("averaging", {}).get("served") or {}
    try:
        algorithm.load_state_dict(found.model)
        algorithm.load_state_dict(served, strict=False)
    except RuntimeError:
        raise RunError(
            f"{found.path} is not a checkpoint of this run: its weights are not those of "
            f"{config.algorithm.name} with {config.backbone} for {len(data['classes'])} classes"
        ) from None
    averaged = bool(served) or (which == "best" and config.averaging.name != "none")
    model = TrainedModel(
        algorithm,
        tuple(data["classes"]),
        config.image_size,
        found.step,
        averaged,
        which,
        data["sources"],
    )
    return model.to(find_device(device))


def _checkpoint(directory: RunDirectory, which: Which) -> checkpoint.Checkpoint:
    step = chosen_step(which)
    if which == "best":
        path = directory.checkpoints / "best"
        if not path.exists():
            raise UserError(f"{directory.path} has no best checkpoint: use the last one")
        return checkpoint.load_this(path)
    found = checkpoint.load_chosen(directory.checkpoints, step)
    if found is None:
        raise UserError(f"{directory.path} has no checkpoint yet: continue it with --resume")
    if step is None and directory.state == "done":
        records = directory.records()
        last = records[-1]["step"] if records else found.step
        if last > found.step:
            raise RunError(
                f"{directory.checkpoints} lacks the last checkpoint, after step {last}; "
                + checkpoint.whole_ones(directory.checkpoints)
            )
    return found


def evaluate_run(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    which: Which | None = None,
    device: str = "auto",
    root: str | None = None,
) -> dict[str, Scores]:
    """Evaluate a run's model on every image of some domains.

    Args:
        run: the run's folder.
        data: a folder DOMAIN/CLASS/IMAGE or CLASS/IMAGE, or a dataset's name (default: the
            run's own target domains).
        which: ``best``, ``last`` or ``step:N``, as in `load_model`.
        device: where to compute.
        root: the data folder, for datasets by name.
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
    """Evaluate several runs' models as one, whose logits are the sum of theirs.

    With runs that average their weights (`sma`), this is the ensemble of averages of Arpit et al.
    (NeurIPS 2022). All runs must know the same classes and take the same images; those evaluated
    by default are the first run's targets. The other arguments are those of `evaluate_run`.
    """
    if not runs:
        raise UserError("an ensemble has at least one run: give their folders")
    models = [load_model(run, which, device) for run in runs]
    _check_ensemble([Path(run) for run in runs], models, data is not None)
    return _evaluate(runs, models, data, root)


def _check_ensemble(runs: Sequence[Path], models: Sequence[TrainedModel], elsewhere: bool) -> None:
    """Refuses runs that cannot be summed, or that were trained on what they are to be tested on."""
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError("a run is in the ensemble twice: name each once")
    configs = [RunDirectory(run).config() for run in runs]
    for run, model, config in zip(runs, models, configs, strict=True):
        if not model.averaged and config.averaging.name != "none":
            log.warning("%s is not finished: its weights are not averaged yet", run)
        for what in ("classes", "image_size", "channels"):
            ours, theirs = getattr(models[0], what), getattr(model, what)
            if ours != theirs:
                raise UserError(
                    f"{run} cannot be in an ensemble with {runs[0]}: their {what} differ, {theirs} "
                    f"and {ours}"
                )
        if not elsewhere and {*config.targets} != {*configs[0].targets}:
            raise UserError(
                f"{run} held out {', '.join(config.targets)} and {runs[0]} "
                f"{', '.join(configs[0].targets)}: choose runs with the same targets, or give "
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
    """The domains to evaluate a model on, and their images in batches."""
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
            f"the data has classes that the model does not know: {', '.join(strange[:5])}. It "
            f"knows {', '.join(classes[:10])}" + (", ..." if len(classes) > 10 else "")
        )
    to_model = np.array([classes.index(name) for name in found])
    view = View(model.image_size, augment=False)
    for domain in domains:
        channels, images = domain.images[0].shape[2], domain.images
        if (channels, model.channels) == (3, 1):
            images = Seen(images, 1)
        elif channels != model.channels:
            raise UserError(
                f"the images of {domain.name!r} have {channels} channels, and the model takes "
                f"{model.channels}"
            )
        seen = replace(domain, images=images, labels=to_model[domain.labels])
        # Files come class by class, and some algorithms look at a batch as a whole.
        shuffled = np.random.default_rng(0).permutation(len(seen))
        yield domain.name, Host(torch.device("cpu")).evaluation(seen, shuffled, view, BATCH)


def _find(
    data: str | os.PathLike[str], classes: Sequence[str], root: str | None
) -> tuple[tuple[str, ...], tuple[Domain, ...]]:
    """The classes and domains of a dataset, or of a folder with or without domains."""
    name = os.fspath(data)
    if name.lower() in (known.lower() for known in dataset_names()):
        dataset = load(name, root)
        return dataset.classes, dataset.domains
    path = Path(name)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder, and no dataset of that name")
    below = subfolders(path)
    # A domain's folder has folders of classes below it, even where it is called as a class is.
    if any(set(subfolders(path / folder)) & set(classes) for folder in below):
        return read_folder(path, below)
    return tuple(below), (read_domain(path, path.resolve().name, below),)


@dataclass(frozen=True)
class Seen:
    """Images of files as a model sees them: those in color, by one for gray images, in gray."""

    images: Images
    channels: int

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> Pixels:
        return with_channels(self.images[index], self.channels)

    def name(self, index: int, /) -> str:
        return self.images.name(index)
