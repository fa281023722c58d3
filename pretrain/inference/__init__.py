"""Use of a trained model: generate text with it, or evaluate it on text.

One process reads a checkpoint from any parallel layout. Nothing is written.

`load.open_run` finds and checks a checkpoint. `load.load_model`, called within `load.single_process`, builds its model:
a module in evaluation mode for `evaluation.evaluate` and `decoding.generate`.
"""
