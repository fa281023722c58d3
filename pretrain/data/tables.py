"""Rows of Parquet files and of folders written by Hugging Face ``datasets``, a batch at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fmoe.errors import UserError, one_line, require
from pretrain.data.sources import CONVERSATION_KEYS, shorten

_ROWS = 256  # rows in memory at a time: documents of a web corpus have some kilobytes each


def read_parquet(path: Path, column: str | None) -> Iterator[object]:
    """Yield the values of one column of a Parquet file, in order.

    Without a column, yield rows: dictionaries of the columns in `CONVERSATION_KEYS`.

    Raises:
        UserError: the file is not Parquet or lacks the column. Damaged rows raise it during iteration.
    """
    parquet = require("pyarrow.parquet", "pretrain", "reading Parquet files")
    with _one_line_errors(path, "a Parquet file"):
        file = parquet.ParquetFile(path)  # in place: datasets.load_dataset would copy it into its cache
        names = file.schema_arrow.names
    columns = _columns(path, column, names)

    def values() -> Iterator[object]:
        with _one_line_errors(path, "a Parquet file"), file:
            for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
                yield from batch.to_pylist() if column is None else batch.column(0).to_pylist()

    return values()


def read_saved(path: Path, column: str | None) -> Iterator[object]:
    """Yield the values of one column of a folder written by ``Dataset.save_to_disk``, or rows as in `read_parquet`.

    Raises:
        UserError: the folder was not written by ``save_to_disk`` or lacks the column. Damaged rows raise it
            during iteration.
    """
    datasets = require("datasets", "pretrain", "reading a folder of datasets.save_to_disk")
    with _one_line_errors(path, "a folder of datasets.save_to_disk"):
        dataset = datasets.load_from_disk(str(path)).with_format(None)
    columns = _columns(path, column, dataset.column_names)

    def values() -> Iterator[object]:
        with _one_line_errors(path, "a folder of datasets.save_to_disk"):
            chosen = dataset.select_columns(columns)
            if column is None:
                yield from chosen
                return
            for batch in chosen.iter(batch_size=_ROWS):
                yield from batch[column]

    return values()


def _columns(path: Path, column: str | None, names: list[str]) -> list[str]:
    columns = [name for name in CONVERSATION_KEYS if name in names] if column is None else [column]
    if not columns:
        raise UserError(f"{path} has neither a column 'messages' nor 'prompt'; its columns are {shorten(names)}")
    for name in columns:
        count = names.count(name)
        if count == 0:
            raise UserError(f"{path} has no column {name!r}; its columns are {shorten(names)}")
        if count > 1:
            raise UserError(f"{path} has {count} columns {name!r}, but must have one: rename the others")
    return columns


@contextmanager
def _one_line_errors(path: Path, what: str) -> Iterator[None]:
    """Convert an error of Arrow in the ``with`` block to a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, TypeError, KeyError, NotImplementedError) as error:  # the bases of Arrow's errors
        raise UserError(f"{path} cannot be read as {what}: {one_line(error, 200)}") from error
