"""Use of a trained model: `generate` text with it, `evaluate` it on text. One process reads a checkpoint of any split;
nothing is written.

`open_run` finds and checks a checkpoint, `single_process` and `load_model` build its model, a module in evaluation mode
that `evaluate` and `generate` take.
"""
