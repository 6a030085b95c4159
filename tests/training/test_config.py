"""The description of a run: what it is completed with, what it refuses, and its trip to a file."""

import json

import pytest

from steppe.domains import dataset_names, dataset_spec
from steppe.errors import UserError
from steppe.optim import optimizer_names, optimizer_spec
from steppe.training import RunConfig, apply_overrides, configure, make_config, read_config
from steppe.training.config import VERSION

DIGITS = {"dataset": "RotatedDigits", "targets": "75"}

WRONG = [
    ({"stepz": 3}, "unknown config key 'stepz', did you mean 'steps'?"),
    ({"optimizer": "fad", "rho": 0.1}, "unknown config key 'rho', did you mean 'optimizer.rho'?"),
    ({"optimizer": "fad", "rh": 0.1}, "unknown config key 'rh', did you mean 'optimizer.rho'?"),
    ({"optimizer": "sam", "ratoi": 0.1}, "did you mean 'optimizer.ratio'?"),
    ({"averaging": "swad", "evry": 9}, "did you mean 'averaging.every'?"),
    ({"rho": 0.1}, "optimizer.rho is an option of sam, asam, gam, gam-exact, fad, .*Choose one"),
    ({"dataset": "PACZ"}, "unknown dataset 'PACZ'.*PACS.*DOMAIN/CLASS/IMAGE"),
    ({"dataset": None}, "config has no 'dataset'"),
    ({"dataset": 5}, "unknown dataset '5'"),
    ({"targets": ()}, "config has no 'targets'"),
    ({"targets": ("75", "75")}, "'75' twice"),
    ({"optimizer": "fda"}, "unknown optimizer 'fda', did you mean 'fad'?"),
    ({"optimizer": {"name": "fad", "rhoo": 1}}, "optimizer 'fad': 'rhoo', did you mean 'rho'?"),
    ({"optimizer": {"rho": 1}}, "optimizer 'adam': 'rho'"),
    ({"optimizer": 5}, "optimizer=5"),
    ({"optimizer": None}, "optimizer=None"),
    ({"optimizer": {"name": "adam", "lr": -1}}, "optimizer.*-1"),
    ({"optimizer": {"name": "sgd", "lr": "fast"}}, "optimizer 'sgd'"),
    (
        {"optimizer": {"name": "sgd", "lr": float("nan")}},
        "optimizer.lr=nan: expected a finite number",
    ),
    ({"optimizer": {"name": "fad", "rho": -0.1}}, "optimizer 'fad'.*rho"),
    ({"optimizer": {"name": "fad", "rho": float("inf")}}, "optimizer.rho=inf"),
    ({"optimizer": {"name": "fad", "rho": "0,1"}}, "optimizer 'fad'"),
    ({"optimizer": {"name": "sgd", "lr": len}}, "optimizer.lr"),
    ({"algorithm": "IRN"}, "unknown algorithm 'IRN'"),
    ({"algorithm": {"name": "ERM", "lambda": 1}}, "no options: remove 'lambda'"),
    ({"algorithm": 5}, "algorithm=5"),
    ({"averaging": "swaad"}, "unknown averaging 'swaad', did you mean 'swad'"),
    ({"averaging": {"name": "swad", "evry": 3}}, "'evry'"),
    ({"averaging": {"name": "swad", "every": 0}}, "every=0"),
    ({"algorithm": {"name": "CORAL", "penalti": 3}}, "'penalti', did you mean 'penalty'"),
    ({"algorithm": {"name": "CORAL", "penalty": -1}}, "penalty=-1"),
    ({"algorithm": {"name": "CORAL", "penalty": "much"}}, "penalty='much'"),
    ({"algorithm": {"name": "IRM", "anneal_steps": 0.5}}, "anneal_steps=0.5"),
    ({"algorithm": "CORAL", "batch_size": 4, "accumulate": 4}, "at least 2 images"),
    ({"split": "random"}, "split='random'.*'domainbed' or 'appendix'"),
    ({"precision": "fp8"}, "precision='fp8'"),
    ({"engine": "on"}, "engine='on'.*'auto', 'off', 'compile' or 'graph'"),
    ({"data": "gpu"}, "data='gpu'.*'auto', 'device', 'stream' or 'host'"),
    ({"steps": 0}, "steps=0.*greater than 0"),
    ({"steps": "many"}, "steps='many'"),
    ({"steps": None}, "steps=None"),
    ({"checkpoint_every": 0}, "checkpoint_every=0"),
    ({"batch_size": 2.5}, "batch_size=2.5"),
    ({"batch_size": 32, "accumulate": 5}, "batch_size=32 is not a multiple of accumulate=5"),
    ({"dropout": 1}, "dropout=1"),
    ({"dropout": float("nan")}, "dropout=nan"),
    ({"seed": -1}, "seed=-1"),
    ({"seed": 2**64}, f"seed={2**64}"),
    ({"workers": -1}, "workers=-1"),
    ({"weights": None}, "weights=None"),
    ({"weights": 5}, "weights=5"),
    ({"augment": True}, "augment=true needs images with 3 channels; RotatedDigits has 1"),
    ({"plugins": "no_such_module_of_mine"}, "plugin 'no_such_module_of_mine'"),
    ({"plugins": "no_such_package.datasets"}, "plugin 'no_such_package.datasets'"),
    ({"plugins": "./mine.py"}, "plugin './mine.py' is not a module name"),
    ({"plugins": [3]}, "plugins.0=3"),
    ({"plugins": 3}, "plugins=3"),
    ({"version": VERSION + 1}, f"newer steppe \\(format {VERSION + 1}.*pip install -U steppe"),
    ({"version": "2"}, "version='2'"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[str(v) for v, _ in WRONG])
def test_a_wrong_value_is_refused_with_its_name(values, message):
    with pytest.raises(UserError, match=message) as caught:
        make_config({**DIGITS, **values})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "optimizer"),
    [*((name, "sgd") for name in dataset_names()), *(("PACS", name) for name in optimizer_names())],
)
def test_what_is_missing_comes_from_the_dataset_and_the_optimizer(dataset, optimizer):
    spec, method = dataset_spec(dataset), optimizer_spec(optimizer)
    config = make_config(
        {"dataset": dataset.lower(), "targets": spec.targets[0], "optimizer": optimizer.upper()}
    )
    assert (config.dataset, config.targets) == (spec.name, spec.targets[0])
    for key in ("steps", "checkpoint_every", "batch_size", "backbone", "image_size", "augment"):
        assert getattr(config, key) == getattr(spec, key)
    assert config.weights == ("imagenet" if spec.pretrained else "none")
    assert config.freeze_bn is spec.pretrained
    expected = method.defaults("fair", spec.pretrained)
    assert (config.optimizer.name, config.optimizer.options) == (optimizer, expected)
    assert RunConfig(**json.loads(config.to_json())) == config


def test_the_learning_rate_depends_on_where_the_weights_come_from(tmp_path):
    def rate(**values):
        values = {"dataset": "PACS", "targets": "sketch", **values}
        return make_config(values).optimizer.options["lr"]

    assert rate() == rate(weights=str(tmp_path / "mine.safetensors")) == 5e-5
    assert rate(weights="none") == 3e-3
    assert rate(weights="none", optimizer="sgd") == pytest.approx(2e-2)
    assert rate(weights="none", optimizer={"name": "sgd", "lr": 0.5}) == 0.5


@pytest.mark.parametrize("weights", ["imagenet", "none"])
@pytest.mark.parametrize("space", ["fair", "fad", "domainbed"])
def test_a_space_gives_its_defaults_without_a_draw(space, weights):
    options = {"dataset": "PACS", "targets": "sketch", "optimizer": "adamw", "weights": weights}
    named = configure(options, space=space)
    drawn = configure(options, space=space, draw=0)
    # DomainBed and the paper go by the dataset, whatever the network starts from.
    expected = optimizer_spec("adamw").defaults(space, weights == "imagenet" or space != "fair")
    assert named.optimizer.options == drawn.optimizer.options == expected
    assert named.space == drawn.space == space
    assert configure(options).optimizer == configure(options, space="fair").optimizer


def test_a_run_of_before_is_resumed_with_the_values_it_has():
    """Naming its optimizer again must not give it the defaults of today."""
    old = make_config({"dataset": "PACS", "targets": "sketch", "optimizer": "fad"})
    made_with = {"lr": 5e-5, "weight_decay": 1e-4, "momentum": 0.9, "rho": 0.05}
    values = {**old.model_dump(), "version": 3, "space": None}
    values["optimizer"] = {"name": "fad", "alpha": 0.5, "beta": 0.5, **made_with}
    begun = RunConfig(**values)
    again = configure({"optimizer": "FAD", "dataset": "PACS"}, resumed=begun)
    assert again == begun
    assert configure({}, ["optimizer=FAD"], resumed=begun) == begun
    changed = configure({"optimizer": "sam"}, resumed=begun)
    assert changed.optimizer.options["lr"] == 1e-3


def test_given_values_come_before_defaults():
    config = make_config(
        {**DIGITS, "optimizer": {"name": "fad", "rho": 0.2}, "steps": 7, "freeze_bn": True}
    )
    assert (config.steps, config.freeze_bn) == (7, True)
    assert config.optimizer.options == {
        **make_config({**DIGITS, "optimizer": "fad"}).optimizer.options,
        "rho": 0.2,
    }


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("steps=50", "steps", 50),
        (" steps = 50", "steps", 50),
        ("augment=false", "augment", False),
        ("workers=null", "workers", None),
        ("dropout=1e-1", "dropout", 0.1),
        ("targets=0", "targets", ("0",)),  # a domain's name, not the number nothing
        ("targets=0,15", "targets", ("0", "15")),
        ("targets=[0, 15]", "targets", ("0", "15")),
        ('targets=["0"]', "targets", ("0",)),
        ("loggers=tensorboard", "loggers", ("tensorboard",)),
        ("optimizer=sgd", "optimizer.name", "sgd"),
        ("optimizer.momentum=0.5", "optimizer.momentum", 0.5),
        ("optimizer.betas=[0.5, 0.9]", "optimizer.betas", [0.5, 0.9]),
        ("root=/a=b", "root", "/a=b"),
    ],
)
def test_overrides(override, key, value):
    optimizer = "adam" if "betas" in override else "sam"
    config = configure({**DIGITS, "optimizer": optimizer}, [override]).model_dump()
    outer, _, inner = key.partition(".")
    assert (config[outer][inner] if inner else config[outer]) == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "--set steps: expected KEY=VALUE"),
        ("optimiser.rho=0.1", "unknown axis 'optimiser', did you mean 'optimizer'?"),
        ("dataset.name=PACS", "only algorithm, optimizer, averaging take a dot"),
        ("stepz=3", "did you mean 'steps'"),
        ("optimizer.rhoo=3", "did you mean 'rho'"),
        ("optimizer.lr=fast", "optimizer 'fad'"),
    ],
)
def test_a_wrong_override_is_refused(override, message):
    with pytest.raises(UserError, match=message):
        configure({**DIGITS, "optimizer": "fad"}, [override])


def test_the_later_override_the_earlier(tmp_path):
    file = tmp_path / "config.json"
    values = {**DIGITS, "optimizer": {"name": "fad", "rho": 0.5, "alpha": 0.9}, "steps": 9}
    file.write_text(make_config(values).to_json())
    config = configure({"steps": 8}, ["steps=7", "optimizer.rho=0.1"], file=file)
    assert config.steps == 7
    assert config.optimizer.options["rho"] == 0.1
    assert config.optimizer.options["alpha"] == 0.9
    # Another optimizer brings its own options.
    assert "alpha" not in configure({"optimizer": "sam"}, file=file).optimizer.options
    assert configure({}, file=file, space="fair").space == "fair"
    with pytest.raises(UserError, match="--space fad would change nothing"):
        configure({}, file=file, space="fad")
    # What is drawn comes after options and before overrides; names may be in any case.
    drawn = configure({"optimizer": "FAD", "steps": 8}, ["dropout=0.3"], file=file, draw=1)
    assert (drawn.steps, drawn.dropout, drawn.optimizer.name) == (8, 0.3, "fad")
    assert drawn.batch_size == 39
    # The draw depends on what overrides say, and leaves what it does not draw.
    options = {"dataset": "VLCS", "targets": "SUN09"}
    texts = ["trial_seed=2", 'optimizer={"name": "sam", "adaptive": true}']
    drawn = configure({**options, "optimizer": "sgd"}, texts, draw=5)
    plain = configure({**options, "trial_seed": 2, "optimizer": "sam"}, draw=5)
    assert drawn.optimizer.options == {**plain.optimizer.options, "adaptive": True}
    assert (drawn.trial_seed, drawn.batch_size) == (2, plain.batch_size)


def test_a_config_is_the_same_after_a_trip_through_its_file(tmp_path):
    given = {
        **DIGITS,
        "targets": ("0", "75"),
        "sources": ["15", "30"],
        "optimizer": {"name": "adam", "betas": (0.8, 0.9), "eps": 1e-9},
        "weights": str(tmp_path / "w.safetensors"),
        "loggers": "tensorboard,wandb",
        "workers": 2,
        "seed": 2**63 - 1,
    }
    config = make_config(given)
    file = tmp_path / "config.json"
    file.write_text(config.to_json())
    assert read_config(file) == config
    # Field by field, as a resumed run compares them.
    assert read_config(file).model_dump() == config.model_dump()
    assert make_config(config.model_dump()) == config
    assert apply_overrides(config.model_dump(), []) == config.model_dump()


NEW_KEYS = ("engine", "data")
"""Of format 3."""


@pytest.mark.parametrize(("version", "engine"), [(1, "off"), (2, "off"), (3, "auto")])
def test_a_run_from_before_there_was_an_engine_goes_on_without(tmp_path, version, engine):
    values = json.loads(make_config({**DIGITS, "precision": "fp32"}).to_json())
    values = {key: value for key, value in values.items() if key not in NEW_KEYS}
    values["version"] = version
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    config = read_config(file)
    assert (config.version, config.engine, config.data) == (version, engine, "auto")
    assert configure({}, resumed=config) == config
    assert configure({}, ["engine=graph"], resumed=config).engine == "graph"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b'{"dataset": "Rotat', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[1, 2]", "expected a JSON object"),
        (b'{"targets": "75"}', "config has no 'dataset'"),
        (json.dumps({**DIGITS, "version": 99, "new_key": 1}).encode(), "newer steppe"),
        (json.dumps({**DIGITS, "stepz": 1}).encode(), "did you mean 'steps'"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path, content, message):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_config(file)
    assert str(file) in str(caught.value)


def test_a_config_does_not_change():
    config = make_config(DIGITS)
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3


def test_several_domains_in_one_text():
    expected = ("60", "75")
    for targets in ("60,75", "60, 75", ["60,75"], ["60", "75"], ["60+75"], "60+75"):
        assert make_config({**DIGITS, "targets": targets}).targets == expected
    assert make_config({**DIGITS, "sources": ["0,15"]}).sources == ("0", "15")


def test_a_domain_may_have_a_comma_or_a_plus_in_its_name(tmp_path):
    for domain in ("a,b", "c+d", "a", "b"):
        (tmp_path / domain / "cat").mkdir(parents=True)
    config = make_config({"dataset": str(tmp_path), "targets": ["a,b", "c+d"]})
    assert config.targets == ("a,b", "c+d")
    assert make_config({"dataset": str(tmp_path), "targets": "a,c+d"}).targets == ("a", "c+d")
