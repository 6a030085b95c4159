"""Images for benchmarks, and a way to run a script as its command, without a new process."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three domains of small images."""
    rng = np.random.default_rng(0)
    for domain in ("ink", "oil", "pen"):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / domain / name
            folder.mkdir(parents=True)
            for i in range(5):
                pixels = rng.integers(256, size=(20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "images"


@pytest.fixture
def carry_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """The result of a script, which it has printed and stored."""

    def run(script: ModuleType, *words: object) -> dict[str, Any]:
        path = tmp_path / "deep" / "result.json"
        name = Path(str(script.__file__)).name
        arguments = [*map(str, words), "--json", "--save", str(path)]
        monkeypatch.setattr("sys.argv", [name, *arguments])
        monkeypatch.setattr("signal.signal", lambda *_: None)  # it would outlive the test
        with pytest.raises(SystemExit) as ended:
            script.main()
        assert not ended.value.code
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert json.loads(path.read_text()) == result
        assert result["environment"]["command"].startswith(f"python benchmarks/{name} ")
        assert "--save" not in result["environment"]["command"]
        return result

    return run
