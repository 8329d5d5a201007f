"""A run that is stopped in the middle, and goes on."""

import pytest

from neurocoder_lab import run
from neurocoder_lab.run import execute, finished, folder_of


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
