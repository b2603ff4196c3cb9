"""YAML files of Accelerate are read, or an error says why not; see tests/test_hostile_files.py for more of them."""

import pytest

from lightning_hetero.accelerate.yaml_file import read_yaml

WRONG = (b"!!bool x", b"!!timestamp x", b"!!int ''", b"2026-13-45", b"9" * 5000, b"\xff", b"[" * 5000)


@pytest.mark.parametrize("value", WRONG)
def test_what_is_no_yaml_is_a_value_error_with_a_reason(value, tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"a: " + value)
    with pytest.raises(ValueError, match=r"."):
        read_yaml(str(tmp_path / "a.yaml"))


def test_a_file_is_read_and_one_that_is_not_there_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("a: [1, é]", encoding="utf-8")
    assert read_yaml(str(tmp_path / "a.yaml")) == {"a": [1, "é"]}
    with pytest.raises(ValueError, match=r"No such file.*b\.yaml"):
        read_yaml(str(tmp_path / "b.yaml"))
