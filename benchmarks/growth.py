"""How time and memory grow: packing with images; steps, checkpoints and curvature with parameters.

Each measurement is a process of its own, at each of two sizes. `benchmarks/report.py` measures the
growth with runs.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import harness
import numpy as np
from harness import Result, command, option, track

IMAGES = (500, 2_000)
PARAMETERS = (2_000_000, 8_000_000)
BATCH = 64

CHILD = """
import json, re, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import growth
status = Path("/proc/self/status")
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) / 2**10
work = growth.KINDS[sys.argv[2]][1](int(sys.argv[3]), Path(sys.argv[4]))
before = peak()
print(json.dumps([min(growth.seconds(work) for _ in range(int(sys.argv[5]))), peak() - before]))
"""


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    rounds: int = option(3, "Measurements of each; the fastest counts.", min=1)


def measure(options: Options) -> Result:
    found: Result = {}
    for name, (sizes, _) in track(KINDS.items(), "growth"):
        taken = {}
        for size in sizes:
            with tempfile.TemporaryDirectory(prefix="steppe-bench-") as home:
                words = [str(Path(__file__).parent), name, str(size), home, str(options.rounds)]
                done = subprocess.run(
                    [sys.executable, "-c", CHILD, *words], check=True, capture_output=True
                )
            spent, memory = json.loads(done.stdout.splitlines()[-1])
            taken[str(size)] = {"CPU seconds": round(spent, 5), "more MiB": round(memory, 1)}
        first, last = (one["CPU seconds"] for one in taken.values())
        taken["ratios"] = {"size": sizes[1] / sizes[0], "CPU seconds": round(last / first, 2)}
        found[name] = taken
    return {"rounds": options.rounds, "batch of the steps": BATCH, "growth": found}


def seconds(work: Callable[[], object]) -> float:
    """CPU time: it does not grow when others use the machine."""
    began = time.process_time()
    work()
    return time.process_time() - began


def _folder(images: int, home: Path) -> Path:
    from PIL import Image

    pixels = np.random.default_rng(0)
    for number in range(images):
        folder = home / "photos" / f"domain{number % 4}" / f"class{number // 4 % 5}"
        folder.mkdir(parents=True, exist_ok=True)
        shown = pixels.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(shown).resize((160, 160)).save(folder / f"{number}.jpg")
    return home / "photos"


def _list(images: int, home: Path) -> Callable[[], object]:
    from steppe.domains import load

    folder = _folder(images, home)
    return lambda: load(folder)


def _pack(images: int, home: Path) -> Callable[[], object]:
    from steppe.domains import load, packing

    dataset = load(_folder(images, home))
    return lambda: packing.make(dataset, home, force=True, jobs=1)


def _network(parameters: int):  # type: ignore[no-untyped-def]
    """A perceptron, its loss, and its number of parameters, which is close to what was asked."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = round(parameters**0.5)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())
    model.append(torch.nn.Linear(width, 7))
    inputs, labels = torch.randn(BATCH, width), torch.randint(7, (BATCH,))
    return model, lambda: F.cross_entropy(model(inputs), labels)


def _step(name: str) -> Callable[[int, Path], Callable[[], object]]:
    def prepare(parameters: int, _: Path) -> Callable[[], object]:
        from steppe.optim import build_optimizer

        model, loss = _network(parameters)
        optimizer = build_optimizer(name, model.parameters(), model=model)

        def closure():  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        optimizer.step(closure)
        return lambda: [optimizer.step(closure) for _ in range(5)]

    return prepare


def _checkpoint(parameters: int, home: Path) -> Callable[[], object]:
    from steppe.training import checkpoint

    model, _ = _network(parameters)
    return lambda: checkpoint.save(home, 1, model.state_dict(), {})


def _product(parameters: int, home: Path) -> Callable[[], object]:
    from steppe.curvature.hessian import derivatives

    model, loss = _network(parameters)
    inputs = list(model.parameters())
    _, product = derivatives(loss(), inputs)
    return lambda: product([parameter.detach() for parameter in inputs])


KINDS: dict[str, tuple[tuple[int, int], Callable[[int, Path], Callable[[], object]]]] = {
    "listing a folder, by images": (IMAGES, _list),
    "packing a folder, by images": (IMAGES, _pack),
    "five SGD steps, by parameters": (PARAMETERS, _step("sgd")),
    "five FAD steps, by parameters": (PARAMETERS, _step("fad")),
    "a checkpoint, by parameters": (PARAMETERS, _checkpoint),
    "a Hessian-vector product, by parameters": (PARAMETERS, _product),
}


main = command(Options, measure)
