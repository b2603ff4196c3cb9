"""The page on the schema of a record says what the code says."""

import json
import re
import runpy
from dataclasses import fields
from pathlib import Path

from lightning_hetero.core.report import records
from tests.report.runs import lines_of, simulated

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "run_record.py"))
PAGE = (ROOT / "docs" / "run-record.md").read_text()


def test_the_page_is_up_to_date():
    assert SCRIPT["page"](PAGE) == PAGE, "run make map"


def test_every_kind_and_field_is_in_the_page():
    kinds = {cls.kind for cls in vars(records).values() if hasattr(cls, "kind")}
    assert kinds == set(re.findall(r"^## `(\w+)`$", PAGE, re.M))
    for cls in SCRIPT["KINDS"]:
        meanings = SCRIPT["meanings"](cls)
        assert set(meanings) == {one.name for one in fields(cls)}, "each field is described, and nothing else"
        assert all(meanings.values())
    assert ">>>" not in PAGE
    (front_ends,) = re.findall(r"^\| `front_end` .*$", PAGE, re.M)
    named = {"Trainer", "Fabric", "Accelerate", "Transformers", "own loop"}
    assert set(re.findall(r'`"([^"]+)"`', front_ends)) == named, "each is recorded in tests/test_run_report.py"
    assert re.search(r"^\| `version` \| integer >= 1 \| always there \| version of the schema. \|$", PAGE, re.M)


def test_what_is_written_has_the_types_of_the_page():
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.M))
    kinds = {"number": (int, float), "integer": int, "text": str, "true": bool, "object": dict, "list": list}
    found = 0
    for line in lines_of(simulated(rounds=3, steps=3)):
        for name, value in json.loads(line).items():
            if name not in ("kind", "version", "crc"):
                expected = kinds[re.match(r"\w+", table[name])[0]]
                assert isinstance(value, expected), (name, value)
                found += 1
    assert found > 50
