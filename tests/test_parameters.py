"""The sizes of the papers' models follow where the papers say how to build them."""

import pytest

from neurocoder_lab import parameters


@pytest.mark.parametrize("cell", [c for c in parameters.cells() if c.follows], ids=lambda c: f"{c.task}, {c.model}")
def test_a_size_follows_from_the_paper(cell):
    assert cell.count() == pytest.approx(cell.paper, rel=parameters.TOLERANCE)


def test_every_cell_can_be_counted_and_the_table_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    parameters.main()
    printed = capsys.readouterr().out
    assert all(f"{cell.count():,.0f}" in printed for cell in parameters.cells())
    assert len(parameters.cells()) == 31
