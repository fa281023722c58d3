"""Use of a trained model: generate text with it, or evaluate it on text.

The model may be split over ranks, at another split than that of the checkpoint. Nothing is written.

`load.open_run` finds and checks a checkpoint. `load.load_model`, called within `load.process_groups`, builds its model
or this rank's part of it: a module in evaluation mode for `evaluation.evaluate` and `decoding.generate`.
"""
