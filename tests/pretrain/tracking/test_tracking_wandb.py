import sys
from types import SimpleNamespace

import pytest

from pretrain.tracking.wandb import ID_FILE, WandbTracker


class FakeWandb:
    """Stands for the module: what the tracker asks of it, and what it logs."""

    def __init__(self, mode="online", has_key=True):
        self.mode, self.has_key = mode, has_key
        self.inits, self.rows, self.exit_codes, self.logins = [], [], [], []

    def Settings(self, **settings):
        return settings

    def setup(self, settings):
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, **arguments):
        self.logins.append(arguments)
        return self.has_key

    def init(self, **arguments):
        self.inits.append(arguments)
        return SimpleNamespace(
            url="https://example.invalid/run",
            log=lambda metrics, step: self.rows.append((step, metrics)),
            finish=lambda exit_code: self.exit_codes.append(exit_code),
        )

    def Histogram(self, np_histogram):
        return ("histogram", *np_histogram)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")

    def make(**settings):
        module = FakeWandb(**settings)
        monkeypatch.setitem(sys.modules, "wandb", module)
        return module

    return make


@pytest.mark.parametrize(
    ("mode", "has_key", "expected"),
    [
        ("online", True, "online"),
        ("online", False, "offline"),
        ("shared", False, "offline"),
        ("offline", True, "offline"),
        ("disabled", True, "disabled"),
    ],
)
def test_mode(tmp_path, fake, mode, has_key, expected):
    module = fake(mode=mode, has_key=has_key)
    WandbTracker(tmp_path, config={}, resume_step=None)
    (init,) = module.inits
    assert init["mode"] == expected
    assert init["resume"] == ("allow" if expected == "online" else None)
    assert init["settings"]["silent"]
    assert all(login == {"prompt": False, "verify": False} for login in module.logins)
    assert bool(module.logins) == (mode not in ("offline", "disabled")), "offline is not to look for keys"


def test_logs_steps_config_and_bars(tmp_path, fake):
    module = fake()
    tracker = WandbTracker(tmp_path, config={"a": 1}, resume_step=None, project="p", name="n")
    tracker.log(7, {"loss": 1.0, "mfu": None, "load": [0.25, 0.75]})
    tracker.close(ok=False)
    init = module.inits[0]
    assert (init["config"], init["project"], init["name"], init["dir"]) == ({"a": 1}, "p", "n", str(tmp_path))
    assert module.rows == [(7, {"loss": 1.0, "load": ("histogram", [0.25, 0.75], [0.0, 1.0, 2.0])})]
    assert module.exit_codes == [1]


def test_id_is_kept_on_resuming_and_new_for_a_new_run(tmp_path, fake):
    module = fake()
    for resume_step in (None, 5, 0, None):
        WandbTracker(tmp_path, config={}, resume_step=resume_step, name="n")
    first, resumed, again, new = [init["id"] for init in module.inits]
    assert first == resumed == again
    assert new != first
    assert {init["name"] for init in module.inits} == {"n"}
    (tmp_path / ID_FILE).unlink()
    WandbTracker(tmp_path, config={}, resume_step=5)
    assert module.inits[-1]["id"] not in (first, new), "a run that had no id gets one"


def test_an_offline_run_that_resumes_is_a_new_run_of_the_group(tmp_path, fake, monkeypatch):
    module = fake(mode="offline")
    for resume_step in (None, 5, 7):
        WandbTracker(tmp_path, config={}, resume_step=resume_step, name="n")
    first, *resumed = module.inits
    assert [init["id"] for init in resumed] == [None, None] and first["id"] is not None
    assert {init["group"] for init in module.inits} == {first["id"]}
    assert [init["name"] for init in module.inits] == ["n", "n-from-5", "n-from-7"]
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    WandbTracker(tmp_path, config={}, resume_step=None)
    assert module.inits[-1]["group"] == "mine"
