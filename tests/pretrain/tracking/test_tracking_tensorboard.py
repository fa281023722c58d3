import math

import pytest

from pretrain.tracking.tensorboard import TensorBoardTracker

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(folder):
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


def test_scalars_and_bars(tmp_path):
    tracker = TensorBoardTracker(tmp_path, config={"model": {"num_layers": 2}}, resume_step=None)
    tracker.log(3, {"loss": 2.5, "mfu": math.nan, "none": None, "text": "x", "load": [0.2, 0.8], "empty": []})
    tracker.close()
    events = read(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["loss", "mfu"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 2.5)]
    (histogram,) = events.Histograms("load")
    assert histogram.step == 3
    assert list(histogram.histogram_value.bucket) == [0.2, 0.8]
    assert list(histogram.histogram_value.bucket_limit) == [1.0, 2.0]
    assert "num_layers" in str(events.Tensors("config/text_summary")[0])
