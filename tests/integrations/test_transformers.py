"""FlatnessTrainer against a plain loop over the same batches, and against the Trainer itself."""

import os
import runpy
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.utils.data import IterableDataset, SequentialSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from steppe.errors import UserError
from steppe.integrations.transformers import FlatnessTrainer
from steppe.optim import DISAM, FAD, GAM, SAM, Bfloat16Warning, GAMExact
from tests import processes

ROOT = Path(__file__).parents[2]
METHODS = {"fad": FAD, "sam": SAM, "gam": GAM, "every other step": partial(FAD, ratio=0.5)}


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """Its state is one for the process: the first Trainer's precision would stay."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def bert(dtype=torch.float64, dropout=0.1):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = BertForSequenceClassification(config).to(dtype)
    # The Trainer takes the loss for one that is divided by all labels of a step; it is a mean.
    model.accepts_loss_kwargs = False
    return model


SENTENCES = [{"input_ids": [n % 11, n * 3 % 11, 5], "labels": n // 3 % 2} for n in range(26)]
"""Seven batches of four, the last one short."""


def arguments(folder, **settings):
    defaults = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.02,
        "optim": "adamw_torch",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **{**defaults, **settings})


def weights(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def groups(trainer, weight_decay):
    """The Trainer's: not everything decays. Norms over all parameters are sums in this order."""
    decayed = trainer.get_decay_parameter_names(trainer.model)
    named = list(trainer.model.named_parameters())
    return [
        {"params": [p for n, p in named if n in decayed], "weight_decay": weight_decay},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def windows(loader, n, epochs=2):
    """The micro-batches of each step, in the Trainer's order."""
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        batches = iter(loader)
        step = list(zip(range(n), batches, strict=False))
        while step:
            yield [batch for _, batch in step]
            step = list(zip(range(n), batches, strict=False))


@pytest.mark.parametrize(("n", "clip"), [(1, 0.0), (3, 0.1)], ids=["plain", "accumulated, clipped"])
@pytest.mark.parametrize("name", METHODS)
def test_the_plain_loop(name, n, clip, tmp_path):
    """With dropout: its masks are drawn as the Trainer draws them, and repeated in each pass."""
    args = arguments(tmp_path, gradient_accumulation_steps=n, max_grad_norm=clip, weight_decay=0.1)
    trainer = FlatnessTrainer(bert(), args, train_dataset=SENTENCES, flatness=METHODS[name])
    torch.manual_seed(1)
    trainer.train()

    model = bert()
    made = Trainer(model, args, train_dataset=SENTENCES)
    base = torch.optim.AdamW(groups(made, weight_decay=0.1), lr=0.02)
    opt = METHODS[name](base, model=model)
    total = 2 * -(-7 // n)
    scheduler = get_linear_schedule_with_warmup(opt, 0, total)
    torch.manual_seed(1)  # decides the order of the data, too
    loader = made.get_train_dataloader()
    model.train()
    reported = []
    for batches in windows(loader, n):
        for phase in opt.phases():
            with phase:
                parts = [model(**batch).loss / len(batches) for batch in batches]
                for part in parts:
                    part.backward()
            if phase.index == 0:
                reported.append(sum(part.item() for part in parts))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        scheduler.step()
    assert torch.equal(weights(trainer.model), weights(model))
    # Logged in float32.
    assert losses(trainer) == pytest.approx(reported, rel=1e-6)
    assert trainer.state.global_step == len(reported) == total


def test_losses_are_averaged_over_the_tokens_of_a_step(tmp_path):
    """Not over those of each micro-batch, which here have different numbers of labels."""
    config = GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)

    def gpt():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).double()

    texts = []
    for n in range(8):
        tokens = torch.arange(n, n + 6) * (n + 1) % 11
        position = torch.arange(6)
        kept = (position > 0) & (position < 2 + n // 2)
        texts.append({"input_ids": tokens, "labels": torch.where(kept, tokens, -100)})
    args = arguments(tmp_path, optim="sgd", gradient_accumulation_steps=2, num_train_epochs=1)
    args.per_device_train_batch_size = 2
    trainer = FlatnessTrainer(gpt(), args, train_dataset=texts, flatness=FAD)
    trainer.train()

    model = gpt()
    made = Trainer(model, args, train_dataset=texts)
    opt = FAD(torch.optim.SGD(groups(made, weight_decay=0.0), lr=0.02), model=model)
    scheduler = get_linear_schedule_with_warmup(opt, 0, 2)
    loader = made.get_train_dataloader()
    for batches in windows(loader, 2, epochs=1):
        n_labels = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        for phase in opt.phases():
            with phase:
                for batch in batches:
                    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
                    targets = batch["labels"][:, 1:]
                    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                    (loss / n_labels).backward()
        opt.step()
        scheduler.step()
    # The model computes its loss in float32.
    torch.testing.assert_close(weights(trainer.model), weights(model), rtol=0, atol=1e-6)


class Stream(IterableDataset):
    """Five batches of four: with two per step, one is left when the epoch ends."""

    def __iter__(self):
        return iter(SENTENCES[:20])


EQUIVALENTS = {
    "accumulated": (SENTENCES, {"gradient_accumulation_steps": 3}),
    "clipped": (SENTENCES, {"max_grad_norm": 0.05}),
    "labels taken out of the inputs": (SENTENCES, {"label_smoothing_factor": 0.1}),
    "left over": (Stream(), {"gradient_accumulation_steps": 2, "max_steps": 4}),
    "bfloat16": (SENTENCES, {"bf16": True}),
}


def test_activations_may_be_checkpointed(tmp_path):
    """They are computed again from the random state of their pass."""
    models = [bert(), bert()]
    for model, checkpointed in zip(models, (False, True), strict=True):
        args = arguments(tmp_path, gradient_checkpointing=checkpointed, max_steps=3)
        FlatnessTrainer(model, args, train_dataset=SENTENCES, flatness=FAD).train()
    assert torch.equal(*map(weights, models))


@pytest.mark.parametrize("case", EQUIVALENTS)
def test_without_flatness_it_is_the_trainer(case, tmp_path):
    """Weights, and logs up to the order of a sum."""
    dataset, settings = EQUIVALENTS[case]
    dtype = torch.float32 if case == "bfloat16" else torch.float64
    dropout = 0.0 if case == "left over" else 0.1  # its next epoch is drawn before it is used

    def train(kind, **options):
        torch.manual_seed(0)
        args = arguments(tmp_path, **settings)
        trainer = kind(bert(dtype, dropout), args, train_dataset=dataset, **options)
        torch.manual_seed(1)
        trainer.train()
        return trainer

    expected = train(Trainer)
    got = train(FlatnessTrainer, flatness=partial(FAD, beta=0.0))
    assert torch.equal(weights(got.model), weights(expected.model))
    assert losses(got) == pytest.approx(losses(expected), rel=1e-6)


def test_labels_are_there_in_every_pass(tmp_path):
    """With smoothing, the Trainer takes them out of the inputs to compute the loss itself."""
    args = arguments(tmp_path, label_smoothing_factor=0.1, max_steps=1)
    trainer = FlatnessTrainer(bert(), args, train_dataset=SENTENCES, flatness=SAM)
    trainer.train()
    assert len(losses(trainer)) == 1


def test_another_loss_is_asked_for_by_name(tmp_path):
    asked = []

    class Named(FlatnessTrainer):
        def compute_loss(self, *args, **options):
            asked.append(self.loss_name)
            return super().compute_loss(*args, **options)

    made = {"train_dataset": SENTENCES, "flatness": DISAM}
    trainer = Named(bert(), arguments(tmp_path, max_steps=2), **made)
    trainer.train()
    assert asked == ["ascent", "main"] * 2
    assert trainer.loss_name == "main"
    with pytest.raises(UserError, match="DISAM asks for the loss 'ascent'"):
        FlatnessTrainer(bert(), arguments(tmp_path, max_steps=1), **made).train()


def test_bfloat16_runs_under_autocast(tmp_path):
    args = arguments(tmp_path, bf16=True, max_steps=1)
    trainer = FlatnessTrainer(bert(torch.float32), args, train_dataset=SENTENCES, flatness=FAD)
    with pytest.warns(Bfloat16Warning):
        trainer.train()


@pytest.mark.parametrize("clip", [0.0, 0.1], ids=["free", "clipped"])
def test_float16(clip, tmp_path):
    """The first steps overflow; they are skipped, and the scheduler waits.

    The Trainer asks the Accelerator for the norm even where it does not clip, which unscales.
    """

    def scaler():
        return GradScaler("cpu", init_scale=2.0**24, backoff_factor=0.1)

    args = arguments(tmp_path, gradient_accumulation_steps=2, max_grad_norm=clip, optim="sgd")
    flat = partial(FAD, rho=0.5)
    trainer = FlatnessTrainer(
        bert(torch.float32, dropout=0.0), args, train_dataset=SENTENCES, flatness=flat
    )
    # It asks for a GPU when told so in its arguments, though torch can do it without.
    trainer.accelerator.scaler, trainer.accelerator.native_amp = scaler(), True
    trainer.accelerator.state._mixed_precision = "fp16"
    trainer.train()

    AcceleratorState._reset_state(True)
    model = bert(torch.float32, dropout=0.0)
    made = Trainer(model, args, train_dataset=SENTENCES)
    base = torch.optim.SGD(groups(made, weight_decay=0.0), lr=0.02)
    opt, scale = flat(base, model=model), scaler()
    scheduler = get_linear_schedule_with_warmup(opt, 0, 8)
    model.train()
    for batches in windows(made.get_train_dataloader(), 2):
        for phase in opt.phases(scale):
            with phase:
                for batch in batches:
                    with torch.autocast("cpu", torch.float16):
                        loss = model(**batch).loss
                    scale.scale(loss.float() / len(batches)).backward()
        scale.unscale_(opt)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        steps = opt.steps
        scale.step(opt)
        scale.update()
        if opt.steps > steps:
            scheduler.step()
    assert 2 <= opt.steps < 8  # some were skipped
    assert torch.equal(weights(trainer.model), weights(model))


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("given", ["made by the Trainer", "given to it"])
def test_a_checkpoint_continues_exactly(given, tmp_path):
    """Moments, the count behind `ratio` and `rho`'s schedule, the learning rate and dropout."""
    flat = partial(FAD, rho=lambda t: 0.1 / t, ratio=0.7)

    def trainer(*callbacks):
        args = arguments(
            tmp_path, gradient_accumulation_steps=2, save_strategy="steps", save_steps=3
        )
        model = bert()
        options = {"flatness": flat}
        if given == "given to it":
            opt = flat(torch.optim.AdamW(model.parameters(), lr=0.02))
            options = {"optimizers": (opt, None)}
        return FlatnessTrainer(
            model, args, train_dataset=SENTENCES, callbacks=list(callbacks), **options
        )

    stopped = trainer(StopAt(3))
    torch.manual_seed(1)
    stopped.train()
    resumed = trainer()
    torch.manual_seed(1)
    torch.rand(100)  # the checkpoint brings its own random state
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    whole = trainer()
    torch.manual_seed(1)
    whole.train()
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.optimizer.optimizer.steps == whole.state.global_step == 8
    assert not torch.equal(weights(stopped.model), weights(whole.model))


def test_training_again_starts_clean(tmp_path):
    """One wrapper, not two; micro-batches that an earlier training has left are forgotten."""
    args = arguments(tmp_path, gradient_accumulation_steps=2, max_steps=2)
    trainer = FlatnessTrainer(bert(), args, train_dataset=Stream(), flatness=FAD)
    trainer.train()
    opt = trainer.optimizer.optimizer
    trainer._passes._kept.append("left over")
    trainer.train()
    assert trainer.optimizer.optimizer is opt
    assert opt.steps == 4
    assert opt.model is trainer.model


def test_the_plain_trainer_says_what_is_missing(tmp_path):
    model = bert()
    opt = FAD(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = Trainer(model, arguments(tmp_path), train_dataset=SENTENCES, optimizers=(opt, None))
    with pytest.raises(RuntimeError, match=r"opt\.phases\(\)"):
        trainer.train()


def test_what_cannot_be_right_is_refused(tmp_path, monkeypatch):
    def trainer(folder=tmp_path, settings=None, **options):
        args = arguments(folder, **(settings or {}))
        return FlatnessTrainer(bert(), args, train_dataset=SENTENCES, **options)

    with pytest.raises(UserError, match=r"got AdamW. Write\n\n.*flatness=partial\(FAD"):
        trainer().train()
    opt = FAD(torch.optim.SGD(bert().parameters(), lr=0.1))
    with pytest.raises(UserError, match="leave one out"):
        trainer(optimizers=(opt, None), flatness=SAM)
    for optim in ("lomo", "galore_adamw_layerwise"):
        with pytest.raises(UserError, match="Use optim='adamw_torch'"):
            trainer(settings={"optim": optim}, flatness=FAD)
    with pytest.raises(UserError, match="GAMExact needs backward"):
        trainer(flatness=GAMExact).train()
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(UserError, match="DeepSpeed"):
        trainer(flatness=FAD)


def test_the_example_is_a_plain_loop(tmp_path):
    """Exactly: over the Trainer's batches, its loop adds no arithmetic of its own."""
    example = runpy.run_path(str(ROOT / "examples" / "hf_trainer.py"))
    got = example["main"](epochs=0.2, seed=3, out=str(tmp_path))

    example["set_seed"](3)
    domains = [example["Digits"](d) for d in example["load"]("RotatedDigits").domains[:-1]]
    dataset = torch.utils.data.ConcatDataset(domains)
    args = arguments(tmp_path, per_device_train_batch_size=32, seed=3)
    model = example["small_resnet"]()
    made = Trainer(model, args, train_dataset=dataset)
    loader = made.get_train_dataloader()
    base = torch.optim.AdamW(groups(made, weight_decay=1e-4), lr=3e-3, fused=True)
    opt = FAD(base, rho=0.05, alpha=0.5, beta=0.5, model=model)
    steps = list(windows(loader, 2, epochs=1))[:5]
    scheduler = get_cosine_schedule_with_warmup(opt, 5, len(steps))
    model.train()
    for batches in steps:
        for phase in opt.phases():
            with phase:
                for batch in batches:
                    (model(**batch).loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        scheduler.step()
    for name, value in model.state_dict().items():  # batch-norm statistics too
        assert torch.equal(got.state_dict()[name], value), name


class InOrder(FlatnessTrainer):
    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def train_in_order(folder, world):
    args = arguments(
        folder,
        per_device_train_batch_size=4 // world,
        gradient_accumulation_steps=2,
        max_grad_norm=0.1,
        optim="sgd",
        **({"ddp_backend": "gloo"} if world > 1 else {}),
    )
    trainer = InOrder(bert(dropout=0.0), args, train_dataset=SENTENCES[:16], flatness=FAD)
    trainer.train()
    return weights(trainer.model)


def work(rank: int, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}/store", 2)  # there is no port to agree on
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.save(train_in_order(path, 2), f"{path}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one_on_the_joint_batch(tmp_path):
    """Up to the order of a sum."""
    processes.ranks(work, 2, str(tmp_path))
    expected = train_in_order(tmp_path, 1)
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)
