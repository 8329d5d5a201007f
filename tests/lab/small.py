"""Small runs, for tests: as the results have them, and stopped in the middle."""

import json

import pytest

from neurocoder_lab import run
from neurocoder_lab.run import execute, finished, folder_of
from neurocoder_lab.sweep import _distilled


def same_when_stopped(experiment, config, folder, monkeypatch, at: int) -> dict:
    """Assert that a run that ends after step `at` and is started again leaves what one does that was left alone."""
    whole, parted = folder / "whole", folder / "parted"
    execute(experiment, config, whole, quiet=True)
    save = run._Run.checkpoint

    def then_stop(self, metrics):
        save(self, metrics)
        if self.step == at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run._Run, "checkpoint", then_stop)
        with pytest.raises(KeyboardInterrupt):
            execute(experiment, config, parted, quiet=True, checkpoint_seconds=0.0)
    execute(experiment, config, parted, quiet=True)
    for name in ("metrics.jsonl", "model.safetensors"):
        first, second = ((folder_of(experiment, config, runs) / name).read_bytes() for runs in (whole, parted))
        assert first == second, name
    first, second = (finished(experiment, config, runs)["final"] for runs in (whole, parted))
    assert first == second
    return first


def distilled(experiment, config, folder) -> dict:
    """A run as it is in the results."""
    execute(experiment, config, folder, quiet=True)
    return json.loads(json.dumps(_distilled(experiment, config, folder)))
