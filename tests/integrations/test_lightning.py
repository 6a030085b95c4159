"""Lightning's two modes against plain loops: the same weights, or an error that says how."""

import contextlib
import copy
import importlib
import itertools
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.limits import seconds

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytorch_lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import steppe.integrations.lightning
import steppe.integrations.pytorch_lightning
from steppe.errors import UserError
from steppe.integrations import _lightning
from steppe.integrations.lightning import ManualFlatness, first_pass
from steppe.optim import FAD, GAM, SAGM, SAM, Bfloat16Warning, GAMExact, frameworks

pytestmark = [
    # What it says of few loader workers and of clusters is about the machine.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

BATCHES = 7
EPOCHS = 2


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * 4, 5, generator=generator)
    return TensorDataset(x, torch.arange(len(x)) % 3)


def loader(tensors=None, size=4):
    # A generator of its own: a loader draws a seed, and the plain loop makes loaders more often.
    return DataLoader(tensors or data(), batch_size=size, generator=torch.Generator())


def batches():
    return list(loader())


def network():
    torch.manual_seed(0)
    layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def fad(module):
    return FAD(sgd(module), rho=0.1, model=module)


def modules(pl, integration):
    """The same two modules, of one of the two packages."""

    class Automatic(pl.LightningModule):
        def __init__(self, configure=fad):
            super().__init__()
            self.net = network()
            self.configure = configure
            self.hooked = []

        def configure_optimizers(self):
            return self.configure(self)

        def loss(self, batch):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def on_before_optimizer_step(self, optimizer):
            self.hooked.append(torch.is_autocast_enabled("cpu"))

    class Manual(integration.ManualFlatness, Automatic):
        accumulate = 1

        def training_step(self, batch, batch_idx):
            loss = self.flatness_step(batch, self.loss, accumulate=self.accumulate)
            if loss is not None:
                self.log("loss", loss, on_step=True, on_epoch=True)

    return SimpleNamespace(pl=pl, integration=integration, Automatic=Automatic, Manual=Manual)


NEWER = modules(lightning.pytorch, steppe.integrations.lightning)
OLDER = modules(pytorch_lightning, steppe.integrations.pytorch_lightning)
both = pytest.mark.parametrize("of", [NEWER, OLDER], ids=["lightning", "pytorch_lightning"])
pl, Automatic, Manual = NEWER.pl, NEWER.Automatic, NEWER.Manual


def fit(module, epochs=EPOCHS, ckpt_path=None, **options):
    of = OLDER if isinstance(module, pytorch_lightning.LightningModule) else NEWER
    trainer = of.pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    torch.manual_seed(5)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def plain(make=fad, accumulate=1, autocast=None, scaler=None, clip_value=None, epochs=EPOCHS):
    """The training guide's loop with phases; returns the model and each step's loss."""
    model = network()
    opt = make(model)
    torch.manual_seed(5)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for _ in range(epochs):
        for start in range(0, BATCHES, accumulate):
            parts = batches()[start : start + accumulate]
            for phase in opt.phases(scaler):
                with phase:
                    for x, y in parts:
                        with autocast or contextlib.nullcontext():
                            loss = F.cross_entropy(model(x), y) / len(parts)
                        scaler.scale(loss).backward(create_graph=opt.needs_graph)
                        if phase.index == 0:
                            losses.append(loss.detach())
            scaler.unscale_(opt)
            if clip_value:
                nn.utils.clip_grad_value_(model.parameters(), clip_value)
            scaler.step(opt)
            scaler.update()
    return model, losses


def same(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", ["Automatic", "Manual"])
@pytest.mark.parametrize(
    ("of", "make"),
    [
        (NEWER, fad),
        (OLDER, fad),
        (NEWER, lambda m: SAM(sgd(m), rho=0.1, model=m, ratio=0.5)),
        (NEWER, lambda m: GAM(torch.optim.Adam(m.parameters()), rho=0.1, model=m, max_norm=0.1)),
    ],
    ids=["fad", "fad in pytorch_lightning", "sam every other step", "gam with clipping"],
)
def test_both_modes_equal_the_plain_loop(of, kind, make):
    module = getattr(of, kind)(make)
    trainer = fit(module)
    model, losses = plain(make)
    assert same(module.net, model)
    assert trainer.global_step == EPOCHS * BATCHES
    # Logged are the losses at the unperturbed weights, one per step.
    assert torch.equal(trainer.callback_metrics["loss_step"], losses[-1])
    mean = torch.stack(losses[-BATCHES:]).double().mean()
    assert abs(trainer.callback_metrics["loss_epoch"] - mean) < 1e-6  # a sum in float32
    assert "log" not in vars(module)
    assert trainer.callbacks == []


@both
def test_accumulation_sees_every_batch_in_every_pass_and_steps_at_the_end_of_an_epoch(of):
    module = of.Manual()
    module.accumulate = 3
    trainer = fit(module)
    model, losses = plain(accumulate=3)
    assert same(module.net, model)
    assert trainer.global_step == EPOCHS * 3  # 3 + 3 + 1 batches
    assert torch.equal(trainer.callback_metrics["loss_step"], losses[-1])


@pytest.mark.parametrize("limit", [4, 0.6])
def test_an_epoch_may_be_cut_short(limit):
    module = Manual()
    module.accumulate = 3
    assert fit(module, limit_train_batches=limit).global_step == EPOCHS * 2  # 3 + 1 batches


def test_what_an_interrupted_fit_gathered_is_forgotten():
    class Interrupted(Manual):
        accumulate = 3

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.max_epochs == 1:
                raise RuntimeError("stop")

    module = Interrupted()
    with pytest.raises(RuntimeError, match="stop"):
        fit(module, epochs=1)
    fit(module)
    assert same(module.net, plain(accumulate=3)[0])
    assert not module._waiting


@both
def test_fp16_is_unscaled_once_and_an_overflow_skips_the_step(of):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=3)

    def make(module):  # a xi that matters, and has to be scaled like the gradients
        return FAD(sgd(module), rho=0.1, model=module, xi=0.1)

    module = of.Manual(make)
    precision = of.pl.plugins.MixedPrecision("16-mixed", device="cpu", scaler=scaler())
    fit(module, plugins=[precision], epochs=3)
    other = scaler()
    half = torch.autocast("cpu", dtype=torch.float16)
    model, _ = plain(make, autocast=half, scaler=other, epochs=3)
    assert precision.scaler.state_dict() == other.state_dict()
    assert 2.0 < other.get_scale() < 2.0**20  # it backed off, and some steps were taken
    assert module.trainer.optimizers[0].steps < 3 * BATCHES == module.trainer.global_step
    assert same(module.net, model)


@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_bfloat16_equals_the_plain_loop_and_warns(kind):
    module = kind()
    with pytest.warns(Bfloat16Warning):
        fit(module, precision="bf16-mixed")
    model, _ = plain(autocast=torch.autocast("cpu", dtype=torch.bfloat16))
    assert same(module.net, model)
    assert not any(module.hooked)  # autocast is for the passes, not for the base's arithmetic


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
@pytest.mark.filterwarnings("ignore::steppe.optim.Bfloat16Warning")
def test_lightning_may_clip_a_method_that_needs_the_loss_scale(precision):
    """Its clipping asks what GradScaler asks, where there is no GradScaler."""

    class Clipped(Manual):
        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            self.clip_gradients(optimizer, 0.01, "norm")

    module = Clipped(lambda module: SAGM(sgd(module), model=module))
    fit(module, precision=precision)
    assert len(module.hooked) == EPOCHS * BATCHES


def test_the_hook_before_a_step_sees_the_direction_once_and_may_clip_it():
    class Clipped(Manual):
        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            nn.utils.clip_grad_value_(self.parameters(), 0.01)

    module = Clipped()
    fit(module)
    assert len(module.hooked) == EPOCHS * BATCHES
    assert same(module.net, plain(clip_value=0.01)[0])


def test_a_method_that_needs_the_graph():
    def make(module):
        return GAMExact(sgd(module), rho=0.1, model=module)

    module = Manual(make)
    fit(module)
    assert same(module.net, plain(make)[0])


def test_a_method_that_asks_for_another_loss():
    """The loss gets its name; one that takes none, and automatic optimization, are refused."""

    def make(module):
        return SAM(sgd(module), rho=0.1, ascent="ascent", model=module)

    def loss(net, batch, name="main"):
        main = F.cross_entropy(net(batch[0]), batch[1])
        return main if name == "main" else 2 * main - main**2

    class Named(Manual):
        def loss(self, batch, name="main"):
            return loss(self.net, batch, name)

    module, model = Named(make), network()
    fit(module, epochs=1)
    opt = make(model)
    torch.manual_seed(5)
    for batch in batches():
        for phase in opt.phases():
            with phase:
                loss(model, batch, phase.loss).backward()
        opt.step()
    assert same(module.net, model)
    with pytest.raises(TypeError, match=r"loss 'ascent', so the loss needs its name as its second"):
        fit(Manual(make), epochs=1)
    with pytest.raises(TypeError, match="the loss 'ascent', so the closure needs its name"):
        fit(Automatic(make), epochs=1)


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("frequency", [1, 2, 3])
def test_schedulers_step_as_in_automatic_optimization(interval, frequency):
    def configure(module):
        opt = fad(module)
        scheduler = StepLR(opt, step_size=1, gamma=0.5)
        config = {"scheduler": scheduler, "interval": interval, "frequency": frequency}
        return {"optimizer": opt, "lr_scheduler": config}

    rates = []
    for kind in Automatic, Manual:
        module = kind(configure)
        trainer = fit(module, epochs=4)  # batches are counted anew in each
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    automatic, manual = rates
    assert manual == automatic < 0.3


def test_a_plateau_is_left_to_the_user():
    class Plateau(Manual):
        def on_train_epoch_end(self):
            self.lr_schedulers().step(1.0)

    def configure(module):
        opt = fad(module)
        return {"optimizer": opt, "lr_scheduler": ReduceLROnPlateau(opt, patience=0)}

    trainer = fit(Plateau(configure), epochs=2)  # the second epoch is no better than the first
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.03)


def test_several_optimizers_take_turns_with_batches_of_their_own():
    class Two(ManualFlatness):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(5, 3), nn.Linear(5, 3)

        def configure_optimizers(self):
            return [SAM(sgd(self.one), rho=0.1), FAD(sgd(self.two), rho=0.1)]

        def training_step(self, batch, batch_idx):
            for handle, layer in zip(self.optimizers(), (self.one, self.two), strict=True):

                def loss(part, layer=layer):
                    return F.cross_entropy(layer(part[0]), part[1])

                self.flatness_step(batch, loss, accumulate=2, optimizer=handle)

    module = Two()
    trainer = fit(module, epochs=1)
    torch.manual_seed(0)
    pairs = [(SAM, nn.Linear(5, 3)), (FAD, nn.Linear(5, 3))]
    for (method, layer), trained in zip(pairs, (module.one, module.two), strict=True):
        opt = method(sgd(layer), rho=0.1)
        for start in range(0, BATCHES, 2):
            parts = batches()[start : start + 2]

            def closure(parts=parts, layer=layer):
                for x, y in parts:
                    (F.cross_entropy(layer(x), y) / len(parts)).backward()

            opt.step(closure)
        assert same(layer, trained)
    assert trainer.global_step == 2 * 4


@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_a_checkpoint_resumes_exactly(kind, tmp_path):
    def make(module):
        return FAD(sgd(module), rho=lambda step: 0.1 / step, ratio=0.5, model=module)

    def module():
        made = kind(make)
        made.net[3] = nn.Identity()  # Lightning does not save random states
        return made

    whole, first, second = module(), module(), module()
    fit(whole, epochs=2)
    fit(first, epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    trainer = fit(second, epochs=2, ckpt_path=tmp_path / "half.ckpt")
    assert same(whole.net, second.net)
    assert trainer.global_step == trainer.optimizers[0].steps == 2 * BATCHES


@both
@pytest.mark.parametrize("kind", ["Automatic", "Manual"])
def test_batch_norm_counts_a_step_once_even_without_a_model(of, kind):
    module = getattr(of, kind)(lambda m: FAD(sgd(m), rho=0.1))
    fit(module)
    assert module.net[1].num_batches_tracked == EPOCHS * BATCHES
    assert same(module.net, plain()[0])


def own_clipping(of):
    class OwnClipping(of.Automatic):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, algorithm=None):
            self.clip_gradients(optimizer, 0.1, "norm")

    return OwnClipping()


def from_iterator(of):
    class FromIterator(of.Automatic):
        def training_step(self, dataloader_iter):
            return super().training_step(next(dataloader_iter)[0], 0)

    return FromIterator()


def own_step(of):
    class OwnStep(of.Automatic):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()
            optimizer.step()

    return OwnStep()


def by_hand(of, use_pl_optimizer=True, passes=True):
    """Manual optimization without `ManualFlatness`."""

    class ByHand(of.Automatic):
        def __init__(self):
            super().__init__(lambda m: FAD(sgd(m), rho=0.1))
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            opt = self.optimizers(use_pl_optimizer)
            if not passes:
                opt.zero_grad()
                self.manual_backward(self.loss(batch))
            else:
                for phase in opt.phases():
                    with phase:
                        loss = self.loss(batch)
                        self.log("loss", loss)
                        self.manual_backward(loss)
            opt.step()

    return ByHand()


def half(of):
    return {"plugins": [of.pl.plugins.MixedPrecision("16-mixed", device="cpu")]}


STEP = "self.flatness_step(batch, self.loss)"


@both
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@pytest.mark.parametrize(
    ("module", "options", "setting", "code"),
    [
        (None, {"gradient_clip_val": 0.5}, "gradient_clip_val=0.5", "max_norm=0.5"),
        (
            None,
            {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
            "Gradient clipping",
            "clip_grad_value_(self.parameters(), 0.5)",
        ),
        (own_clipping, {}, "Gradient clipping", "on_before_optimizer_step"),
        (
            None,
            {"accumulate_grad_batches": 3},
            "accumulate_grad_batches=3",
            "self.flatness_step(batch, self.loss, accumulate=3)",
        ),
        (
            None,
            lambda of: {"callbacks": [of.pl.callbacks.GradientAccumulationScheduler({1: 2})]},
            "accumulate_grad_batches=2",
            "accumulate=2",
        ),
        (None, half, "16-mixed", STEP),
        (from_iterator, {}, "dataloader_iter", "def training_step(self, batch, batch_idx)"),
        (
            lambda of: of.Automatic(lambda m: GAMExact(sgd(m), rho=0.1)),
            {},
            "create_graph=True",
            STEP,
        ),
        (own_step, {}, "without a closure", "optimizer.step(closure=optimizer_closure)"),
        (lambda of: by_hand(of, passes=False), {}, "without a closure", STEP),
        (lambda of: by_hand(of, passes=False), half, "without a closure", STEP),
        (lambda of: by_hand(of, use_pl_optimizer=False), {}, "neither counted", STEP),
    ],
)
def test_what_would_go_wrong_is_refused_with_the_code(of, module, options, setting, code):
    module = of.Automatic() if module is None else module(of)
    with pytest.raises((UserError, RuntimeError)) as caught:
        fit(module, **(options(of) if callable(options) else options))
    message = str(caught.value)
    assert setting in message
    assert code in message
    if "flatness_step" in message:
        assert f"from {of.integration.__name__} import ManualFlatness" in message
    assert "log" not in vars(module)


@both
def test_phases_of_lightnings_handle_are_the_optimizers(of):
    module = by_hand(of)
    trainer = fit(module)
    model, losses = plain()
    assert same(module.net, model)
    assert trainer.global_step == len(module.hooked) == EPOCHS * BATCHES
    assert torch.equal(trainer.callback_metrics["loss"], losses[-1])


@pytest.mark.parametrize(
    "options", [{"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 3}], ids=str
)
def test_what_is_refused_is_wrong_indeed(options, monkeypatch):
    """Without the guard Lightning computes something, and it is not the step."""
    monkeypatch.setattr(frameworks, "GUARDS", {})
    module = Automatic()
    fit(module, **options)
    if "gradient_clip_val" in options:
        right, _ = plain(lambda m: FAD(sgd(m), rho=0.1, model=m, max_norm=0.1))
    else:
        right, _ = plain(accumulate=3)
    gap = (module.net[0].weight - right[0].weight).abs().max()
    assert gap > 1e-3  # far beyond rounding


def test_two_optimizers_have_their_schedulers():
    class Two(Manual):
        def __init__(self):
            super().__init__()
            self.other = network()

        def configure_optimizers(self):
            opts = [FAD(sgd(net), rho=0.1, model=self) for net in (self.net, self.other)]
            schedulers = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.5) for opt in opts]
            about = [{"scheduler": s, "interval": "step", "frequency": 2} for s in schedulers]
            return opts, about

        def training_step(self, batch, batch_idx):
            for net, opt in zip((self.net, self.other), self.optimizers(), strict=True):
                self.flatness_step(
                    batch, lambda b, net=net: F.cross_entropy(net(b[0]), b[1]), optimizer=opt
                )

    before = sgd(network()).param_groups[0]["lr"]
    for opt in fit(Two(), epochs=1).optimizers:
        assert opt.param_groups[0]["lr"] == before * 0.5 ** (BATCHES // 2)


def test_a_copy_of_the_module_can_be_kept_and_used():
    class Validating(Automatic):
        def validation_step(self, batch, batch_idx):
            self.log("v", self.loss(batch))

    class Keep(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            self.kept = copy.deepcopy(pl_module)

    keep = Keep()
    fit(Validating(), callbacks=[keep])
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", **options)
    (found,) = trainer.validate(keep.kept, loader(), verbose=False)
    assert found["v"] > 0


def test_a_log_inside_the_loss_counts_in_the_first_pass():
    class Inside(Manual):
        def loss(self, batch):
            loss = super().loss(batch)
            self.log("inside", loss, on_step=False, on_epoch=True)
            return loss

    logged = fit(Inside(), epochs=1).callback_metrics
    assert logged["inside"] == pytest.approx(logged["loss_epoch"].item(), rel=1e-6)


def test_weight_averaging_with_batch_norm():
    """Its last epoch renews statistics: no step is taken there, and automatic mode is refused."""

    def averaging():
        return [pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)]

    with pytest.raises(UserError, match="StochasticWeightAveraging with batch norm"):
        fit(Automatic(), epochs=3, callbacks=averaging())
    trainer = fit(Manual(), epochs=3, callbacks=averaging())
    assert trainer.optimizers[0].steps == 3 * BATCHES


@both
@pytest.mark.parametrize("name", _lightning.STRATEGIES)
def test_strategies_that_hide_the_parameters_are_refused(of, name):
    strategies = [
        of.pl.strategies,
        importlib.import_module(f"{of.pl.__name__}.strategies.single_xla"),
    ]
    strategy = next(getattr(place, name) for place in strategies if hasattr(place, name))
    module = of.Manual()
    opt = fad(module)
    trainer = SimpleNamespace(
        strategy=strategy.__new__(strategy), optimizers=[opt], callbacks=[], lightning_module=module
    )
    with pytest.raises(UserError, match=name) as caught:
        of.integration.Guard.of(opt, trainer)
    assert 'strategy="ddp"' in str(caught.value)


@pytest.mark.parametrize("guarded", [False, True])
def test_metrics_of_later_passes_are_refused(guarded):
    class Counting(Automatic):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(3)

        def training_step(self, batch, batch_idx):
            if first_pass(self) or not guarded:
                self.accuracy.update(self.net(batch[0]), batch[1])
            return super().training_step(batch, batch_idx)

    module = Counting()
    if guarded:
        fit(module)
        assert module.accuracy.update_count == EPOCHS * BATCHES
    else:
        before = network().state_dict()["0.weight"]
        with pytest.raises(UserError, match="'accuracy'.*in every pass") as caught:
            fit(module)
        assert "first_pass(self)" in str(caught.value)
        assert torch.equal(module.net[0].weight, before)  # back from where the pass was


class Seen(pl.Callback):
    """Which callbacks there are in a step."""

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.callbacks = list(trainer.callbacks)


def test_other_optimizers_are_let_alone(capsys, caplog):
    seen = Seen()
    module = Automatic(sgd)
    with caplog.at_level(logging.INFO):
        trainer = fit(module, callbacks=[seen], gradient_clip_val=0.1, accumulate_grad_batches=2)
    assert trainer.global_step == EPOCHS * 4
    assert seen.callbacks == [seen]
    assert "steppe" not in caplog.text + "".join(capsys.readouterr())
    with pytest.raises(UserError, match="got SGD"):
        fit(Manual(sgd))


def test_an_optimizer_that_is_not_the_trainers_is_let_alone():
    class Aside(Automatic):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            other = network()
            opt = fad(other)
            opt.step(lambda: F.cross_entropy(other(batch[0]), batch[1]).backward())

    seen = Seen()
    fit(Aside(sgd), callbacks=[seen], gradient_clip_val=0.1)
    assert seen.callbacks == [seen]


def test_a_trainer_that_is_used_again_is_guarded_again():
    seen = Seen()
    trainer = fit(Automatic(), callbacks=[seen])
    first = seen.callbacks
    trainer.fit_loop.max_epochs += 1
    trainer.fit(Automatic(), loader())
    assert len(first) == len(seen.callbacks) == 2
    assert first[1] is not seen.callbacks[1]
    trainer.gradient_clip_val = 0.5
    trainer.fit_loop.max_epochs += 1
    with pytest.raises(UserError, match="gradient_clip_val"):
        trainer.fit(Automatic(), loader())


@pytest.mark.parametrize(
    ("here", "missing"), [("lightning", "pytorch_lightning"), ("pytorch_lightning", "lightning")]
)
def test_one_of_the_two_packages_is_enough(here, missing, monkeypatch):
    monkeypatch.setattr(steppe, "integrations", steppe.integrations)
    for name in list(sys.modules):
        if name.startswith((f"{missing}.", "steppe.integrations")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    integration = importlib.import_module(f"steppe.integrations.{here}")
    assert integration.ManualFlatness().automatic_optimization is False


@pytest.mark.parametrize("fabric", [lightning.fabric, lightning_fabric], ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", ["phases", "closure", "neither"])
def test_fabrics_handle_steps_the_optimizer(fabric, way):
    torch.manual_seed(5)
    fabric = fabric.Fabric(accelerator="cpu", devices=1)
    net = network()
    opt = fad(net)
    model, handle = fabric.setup(net, opt)
    torch.manual_seed(5)
    for _ in range(EPOCHS):
        for x, y in batches():
            if way == "closure":
                handle.step(lambda x=x, y=y: fabric.backward(F.cross_entropy(model(x), y)))
                continue
            if way == "neither":
                fabric.backward(F.cross_entropy(model(x), y))
                with pytest.raises(RuntimeError, match="opt.phases()"):
                    handle.step()
                return
            for phase in handle.phases():
                with phase:
                    fabric.backward(F.cross_entropy(model(x), y))
            handle.step()
    assert same(net, plain()[0])
    assert opt.steps == EPOCHS * BATCHES


def test_accumulate_is_a_count():
    module = Manual()
    module.accumulate = 0
    with pytest.raises(UserError, match="accumulate must be at least 1, got 0"):
        fit(module)


def small(kind, perturbation):
    """Without batch norm and dropout, which see each process's part alone; in float64."""

    def make(module):
        model = module if perturbation == "global" else module.trainer.model  # DDP's
        return FAD(sgd(module), rho=0.1, model=model, perturbation=perturbation)

    module = kind(make)
    module.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    module.accumulate = 2
    return module


CASES = list(itertools.product((Automatic, Manual), ("global", "local")))


def train_in_processes(folder):
    """What each process under torchrun does."""
    results = []
    for kind, perturbation in CASES:
        torch.manual_seed(0)
        module = small(kind, perturbation)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        x, y = data().tensors
        part = slice(trainer.global_rank, None, 2)
        trainer.fit(module, loader(TensorDataset(x[part].double(), y[part]), size=2))
        results.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.save(results, f"{folder}/{trainer.global_rank}.pt")


@pytest.mark.slow
def test_two_processes_equal_one_on_the_joint_batch(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        f"from {__name__} import train_in_processes\ntrain_in_processes({str(tmp_path)!r})\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "--nproc-per-node", "2", script],
        env=environment,
        timeout=seconds(1200),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(map(torch.equal, one, other))
    for (kind, perturbation), weights in zip(CASES, one, strict=True):
        torch.manual_seed(0)
        net = small(kind, "global").net
        opt = FAD(sgd(net), rho=0.1)
        accumulate = 2 if kind is Manual else 1
        for start in range(0, BATCHES, accumulate):
            parts = batches()[start : start + accumulate]

            def closure(parts=parts, net=net):
                for x, y in parts:
                    (F.cross_entropy(net(x.double()), y) / len(parts)).backward()

            opt.step(closure)
        gap = (weights - torch.cat([p.detach().flatten() for p in net.parameters()])).abs().max()
        if perturbation == "global":
            assert gap < 1e-12  # sums of float64 in another order
        else:
            assert 1e-6 < gap < 0.1  # each process climbed along its own gradient
