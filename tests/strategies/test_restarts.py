"""A start that may wait for workers that are gone says so before it waits."""

import pytest

from lightning_hetero.frontend.joining import warn_of_stale_addresses


@pytest.mark.parametrize(
    ("restarts", "shared", "warns"), [("1", "True", True), ("0", "True", False), ("1", "False", False)]
)
def test_warning_names_the_cure(restarts, shared, warns, caplog, monkeypatch):
    monkeypatch.setattr("lightning_hetero.frontend.log.log.propagate", True)
    environment = {"TORCHELASTIC_RESTART_COUNT": restarts, "TORCHELASTIC_USE_AGENT_STORE": shared}
    assert warn_of_stale_addresses(environment) is warns
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) is warns
