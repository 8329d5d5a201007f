"""Settings that were chosen on held-out data: tuned.json beside the results, and for the rest the package's own.

search.py makes them; the experiments take the best from here.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from neurocoder_lab.errors import LabError
from neurocoder_lab.results import folder
from neurocoder_lab.store import read_json

Row = dict[str, Any]


def best(experiment: str, setting: str, **place: Any) -> Any:
    """The value of the setting that was chosen at this place; None where none was tried."""
    for row in known():
        if row["experiment"] == experiment and row["place"] == place and setting in row["tried"][0]["values"]:
            return chosen(row)["values"][setting]
    return None


def chosen(row: Row) -> dict[str, Any]:
    """The values with the best mean; those of which a run failed, so that there are fewer, cannot be."""
    most = max(tried["n"] for tried in row["tried"])
    whole = [tried for tried in row["tried"] if tried["n"] == most]
    return (min if row["lower"] else max)(whole, key=lambda tried: tried["mean"])


def at_the_end(row: Row) -> list[str]:
    """Settings whose chosen value is the smallest or largest that was tried: a better one may lie beyond."""
    ends = []
    for name, value in chosen(row)["values"].items():
        values = {tried["values"][name] for tried in row["tried"]}
        numbers = not isinstance(value, str) and len(values) > 1
        ends += [name] if numbers and value in (min(values), max(values)) else []
    return ends


def known() -> list[Row]:
    """What was tuned: beside the results, and for the rest in the package."""
    ours = read(folder() / "tuned.json")
    places = [place_of(row) for row in ours]
    packaged = read(Path(str(files("neurocoder_lab") / "tuned.json")))
    return ours + [row for row in packaged if place_of(row) not in places]


def place_of(row: Row) -> tuple[Any, ...]:
    return row["experiment"], row["place"], sorted(row["tried"][0]["values"])


def read(file: Path) -> list[Row]:
    return _rows(file, file.stat().st_mtime_ns) if file.is_file() else []


@cache
def _rows(file: Path, changed: int) -> list[Row]:
    try:
        rows = read_json(file)
        whole = all({"experiment", "place", "lower"} <= row.keys() and row["tried"][0]["values"] for row in rows)
    except (LabError, TypeError, KeyError, IndexError, AttributeError):
        rows, whole = [], False
    if not whole:
        raise LabError(f"{file} is cut short, edited or from another version: remove it and tune again")
    return rows
