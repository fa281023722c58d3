"""Documents of Hugging Face ``datasets``, streamed from a Hub id, a folder or a builder with data files."""

import contextlib
import glob
import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fmoe.errors import UserError, one_line, printable, require
from pretrain.config.keys import check_path
from pretrain.data.sources import CONVERSATION_KEYS, conversation_text, shorten

STOPPING_STRATEGIES = ("first_exhausted", "all_exhausted")
_HUB_TIMEOUT = 10.0  # seconds for the first answer of the Hub
_TEXT_TYPES = ("string", "large_string")
_TOLERANCE = 1e-3  # of the sum of weights


@dataclass(frozen=True)
class Dataset:
    """A split of a dataset, by the arguments of ``datasets.load_dataset``.

    Attributes:
        name: Hub id (``owner/name``), folder, or builder (``json``, ``parquet``, ``csv``, ``text``, ``arrow``, ...).
        config: configuration (subset) of the dataset; None for its default.
        revision: branch, tag or commit of a Hub dataset; None for its newest commit.
        split: name of the split; with ``data_files``, the name given to these files.
        columns: columns with text. A document is the non-empty texts of a row, joined by `Mixture.separator`.
        data_files: paths or patterns of the files to read. A builder requires them; for a Hub id or a folder, they are
            relative to it.
    """

    name: str
    config: str | None = None
    revision: str | None = None
    split: str = "train"
    columns: tuple[str, ...] = ("text",)
    data_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mixture:
    """Datasets that are read as one: interleaved if they have weights, one after the other if not.

    Attributes:
        datasets: at least one dataset.
        weights: probabilities with which ``datasets.interleave_datasets`` draws the next document from each dataset;
            empty to read the datasets one after the other.
        seed: seed of the draws.
        stopping_strategy: "first_exhausted" ends with the first dataset that is exhausted; "all_exhausted" repeats
            datasets until each has been read at least once.
        separator: text between the texts of several columns.
        max_documents: number of rows after which reading stops; None to read all.
    """

    datasets: tuple[Dataset, ...]
    weights: tuple[float, ...] = ()
    seed: int = 0
    stopping_strategy: str = "first_exhausted"
    separator: str = "\n\n"
    max_documents: int | None = None


@dataclass(frozen=True)
class Stream:
    """An opened `Mixture`.

    Attributes:
        name: names of the datasets, for errors and for metadata files such as ``PREFIX.json``.
        num_bytes: size of the local files. None if it is unknown, or if only an unknown share of them is read.
        provenance: JSON values that describe the mixture.
    """

    name: str
    num_bytes: int | None
    provenance: dict[str, Any]
    _names: tuple[str, ...] = field(repr=False)
    _files: tuple[Path, ...] = field(repr=False)
    _rows: Any = field(repr=False)  # a datasets.IterableDataset with the columns of `_document`

    @property
    def shown(self) -> str:
        """The name in printable form."""
        return self.name

    def files(self) -> list[Path]:
        """All local files of the datasets."""
        return list(self._files)

    def documents(self) -> Iterator[tuple[str, str | None, str]]:
        """Yield (location, text, error) of each row. If a value is not a string, text is None, and ``error`` says why.

        Raises:
            UserError: the data can no longer be reached, or are damaged.
        """
        rows = iter(self._rows)
        while True:
            with _one_line_errors(self.name):
                row = next(rows, None)
            if row is None:
                return
            yield f"{self._names[row['dataset']]}, row {row['row'] + 1}", row["text"], row["error"]


def parse_dataset(text: str) -> tuple[str, str | None, str | None]:
    """Return the name, config and revision of ``NAME[:CONFIG][@REVISION]``.

    If ``text`` is an existing path, all of it is the name.
    """
    with contextlib.suppress(OSError):  # of a name that is too long for a path
        if Path(text).exists():
            return text, None, None
    unversioned, _, revision = text.partition("@")
    name, _, config = unversioned.partition(":")
    return name, config or None, revision or None


def open_mixture(mixture: Mixture, *, conversations: bool = False) -> Stream:
    """Open the datasets of a mixture and read their first rows.

    Args:
        conversations: the text of a row is its `conversation_text`; ``columns`` and ``separator`` have no effect.

    Raises:
        UserError: a value out of range; a dataset, revision, config, split, column or file that does not exist; a
            column that is not text; a dataset with a loading script, or without rows; a gated dataset; a Hub that
            cannot be reached.
    """
    _check(mixture)
    datasets = require("datasets", "pretrain", "reading a dataset")
    opened = [_open(datasets, dataset) for dataset in mixture.datasets]
    parts = [
        _documents(datasets, number, dataset, each, None if conversations else mixture.separator)
        for number, (dataset, each) in enumerate(zip(mixture.datasets, opened, strict=True))
    ]
    if mixture.weights:
        rows = datasets.interleave_datasets(
            parts,
            probabilities=[weight / sum(mixture.weights) for weight in mixture.weights],
            seed=mixture.seed,
            stopping_strategy=mixture.stopping_strategy,
        )
    else:
        rows = datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    if mixture.max_documents is not None:
        rows = rows.take(mixture.max_documents)
    names = tuple(each.shown for each in opened)
    sizes = [each.num_bytes for each in opened]
    is_all = not mixture.weights and mixture.max_documents is None
    return Stream(
        name=", ".join(names),
        num_bytes=sum(filter(None, sizes)) if is_all and None not in sizes else None,
        provenance={
            "datasets": [each.provenance for each in opened],
            "weights": list(mixture.weights),
            "seed": mixture.seed,
            "stopping_strategy": mixture.stopping_strategy,
            "separator": mixture.separator,
            "max_documents": mixture.max_documents,
            "library": f"datasets {datasets.__version__}",
        },
        _names=names,
        _files=tuple(file for each in opened for file in each.files),
        _rows=rows,
    )


def _check(mixture: Mixture) -> None:
    datasets = mixture.datasets
    weights = mixture.weights
    if not datasets:
        raise UserError("datasets=() must have at least one dataset")
    for dataset in datasets:
        if not dataset.name:
            raise UserError("dataset='' has no name: pass a Hub id, a folder or a builder")
        if not dataset.columns or "" in dataset.columns:
            raise UserError(f"columns={dataset.columns} of {_quoted(dataset)} must be one or more names of columns")
    if weights:
        if len(weights) != len(datasets):
            raise UserError(f"weights={weights} must have {len(datasets)} numbers, one for each dataset")
        if not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise UserError(f"weights={weights} must all be positive and finite: to exclude a dataset, leave it out")
        if abs(sum(weights) - 1) > _TOLERANCE:
            raise UserError(f"weights={weights} must sum to 1, not {sum(weights):g}")
    if mixture.stopping_strategy not in STOPPING_STRATEGIES:
        raise UserError(
            f"stopping_strategy={mixture.stopping_strategy!r} must be one of {', '.join(STOPPING_STRATEGIES)}"
        )
    if mixture.seed < 0:
        raise UserError(f"seed={mixture.seed} must be at least 0")
    if mixture.max_documents is not None and mixture.max_documents < 1:
        raise UserError(f"max_documents={mixture.max_documents} must be at least 1")


@dataclass(frozen=True)
class _Opened:
    rows: Any  # datasets.IterableDataset
    shown: str
    num_bytes: int | None
    files: list[Path]
    provenance: dict[str, Any]


def _open(datasets, dataset: Dataset) -> _Opened:
    check_path("dataset", dataset.name)
    path = Path(dataset.name).expanduser()
    split = dataset.split
    facts: dict[str, Any] = {"name": dataset.name, "config": dataset.config, "split": split, "revision": None}
    is_builder = _is_builder(dataset.name)  # `load_dataset` prefers a builder to a folder of the same name
    if is_builder and not dataset.data_files:
        raise UserError(
            f"dataset={dataset.name!r} is a builder and needs data_files; for a folder of this name, pass "
            f"./{dataset.name}"
        )
    if not is_builder and path.exists():
        facts["name"] = printable(path.resolve().name)
    elif not is_builder:
        facts["revision"] = _find_on_hub(datasets, dataset)
    if facts["revision"] is None and dataset.revision is not None:
        raise UserError(
            f"revision={dataset.revision!r} of {_quoted(dataset)} has no effect: only Hub datasets have revisions"
        )
    is_saved = not is_builder and any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if is_saved:
        for key in ("config", "data_files"):
            value = getattr(dataset, key)
            if value:
                raise UserError(
                    f"{key}={value!r} of {_quoted(dataset)} has no effect on a folder of save_to_disk: omit {key}"
                )
        with _one_line_errors(_quoted(dataset)):
            saved = datasets.load_from_disk(str(path))
        splits = saved if isinstance(saved, dict) else {split: saved}
        files = sorted(path.rglob("*.arrow"))
    else:
        if path.is_dir() and (path / f"{path.resolve().name}.py").is_file():
            raise _script_error(f"dataset={printable(str(path))!r}")
        if is_builder or path.exists():
            for pattern in dataset.data_files:
                if "://" not in pattern and not glob.glob(
                    str(Path("" if is_builder else path, pattern)), recursive=True
                ):
                    raise UserError(f"data_files: {pattern!r} of {_quoted(dataset)} matches no file")
        wanted = {split: list(dataset.data_files)} if dataset.data_files else None
        name = dataset.name if is_builder or not path.exists() else str(path)
        with _one_line_errors(_quoted(dataset)):
            builder = datasets.load_dataset_builder(name, dataset.config, data_files=wanted, revision=facts["revision"])
            splits = builder.as_streaming_dataset()
        facts["config"] = dataset.config or builder.config.name
        named = (builder.config.data_files or {}).get(split, ())
        files = [Path(file) for file in map(str, named) if "://" not in file]
        if len(files) < len(named):
            files = []
    if split not in splits:
        raise UserError(f"split={split!r} is not in {_quoted(dataset)}: its splits are {shorten(splits)}")
    rows = splits[split]
    if is_saved:
        facts["fingerprint"] = rows._fingerprint
        rows = rows.with_format(None).to_iterable_dataset()
    else:
        facts["fingerprint"] = builder.hash
    facts["columns"] = list(dataset.columns)
    if dataset.data_files:
        facts["data_files"] = [name if "://" in name else printable(Path(name).name) for name in dataset.data_files]
    return _Opened(
        rows=rows,
        shown=f"{facts['name']}, split {split}" if not is_builder else ", ".join(facts["data_files"]),
        num_bytes=sum(file.stat().st_size for file in files if file.is_file()) if files else None,
        files=files,
        provenance=facts,
    )


def _documents(datasets, number: int, dataset: Dataset, opened: _Opened, separator: str | None):
    """Check the columns, and return rows with the keys text, error, dataset and row.

    Args:
        separator: text between columns; None for conversations.
    """
    rows = opened.rows
    columns = list(dataset.columns)
    with _one_line_errors(_quoted(dataset)):
        first = next(iter(rows), None)
    if first is None:
        raise UserError(f"{_quoted(dataset)} has no rows in split={dataset.split!r}")
    types = {name: getattr(type_, "dtype", "a structure") for name, type_ in (rows.features or {}).items()}
    names = list(types or first)
    if separator is None:
        columns = [name for name in CONVERSATION_KEYS if name in names]
        opened.provenance["columns"] = columns
        if not columns:
            raise UserError(
                f"{_quoted(dataset)} has neither a column 'messages' nor 'prompt'; its columns are {shorten(names)}"
            )
    for column in columns if separator is not None else ():
        if column not in names:
            raise UserError(f"columns: {column!r} is not in {_quoted(dataset)}: its columns are {shorten(names)}")
        value = first[column]  # decides if the types are unknown, as for JSON in datasets 4
        kind = types.get(column) or ("string" if isinstance(value, str | None) else type(value).__name__)
        if kind not in _TEXT_TYPES:
            raise UserError(f"columns: {column!r} of {_quoted(dataset)} has the type {kind}, not text")
    dtypes = {"text": "string", "error": "string", "dataset": "int64", "row": "int64"}
    features = {name: datasets.Value(dtype) for name, dtype in dtypes.items()}
    return rows.select_columns(columns).map(
        _document,
        with_indices=True,
        remove_columns=columns,
        features=datasets.Features(features),
        fn_kwargs={"number": number, "columns": columns, "separator": separator},
    )


def _document(
    row: dict[str, Any], index: int, number: int, columns: Sequence[str], separator: str | None
) -> dict[str, Any]:
    result = {"text": None, "error": "", "dataset": number, "row": index}
    if separator is None:
        try:
            return result | {"text": conversation_text(row)}
        except UserError as error:
            return result | {"error": str(error)}
    for column in columns:
        if not isinstance(row[column], str):
            return result | {"error": f"the value of {column!r} is a {type(row[column]).__name__}, not a string"}
    texts = [row[column] for column in columns]
    return result | {"text": texts[0] if len(texts) == 1 else separator.join(filter(None, texts))}


def _is_builder(name: str) -> bool:
    """Return whether ``datasets`` has a builder of this name. Raise UserError for the builder that unpickles files."""
    if name == "pandas":
        raise UserError("dataset='pandas' is not supported: it unpickles files, which can run code; convert to parquet")
    return name.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{name}") is not None


def _find_on_hub(datasets, dataset: Dataset) -> str | None:
    """Return the current commit of a dataset's revision on the Hub."""
    name = dataset.name
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"dataset={name!r} does not exist: pass a Hub id (owner/name), a folder or a builder")
    hub = require("huggingface_hub", "pretrain", "reading a dataset of the Hub")
    endpoint = datasets.config.HF_ENDPOINT
    api = hub.HfApi(endpoint=endpoint)
    quoted = _quoted(dataset)
    try:
        info = api.dataset_info(name, revision=dataset.revision, timeout=_HUB_TIMEOUT)
        if info.gated:
            api.auth_check(name, repo_type="dataset")
    except hub.errors.GatedRepoError as error:
        raise UserError(
            f"{quoted} is gated: accept its terms at {endpoint}/datasets/{name}, then set HF_TOKEN to your access token"
        ) from error
    except hub.errors.RevisionNotFoundError as error:
        raise UserError(f"revision={dataset.revision!r} is not in {quoted} at {endpoint}") from error
    except (hub.errors.RepositoryNotFoundError, hub.errors.HFValidationError) as error:
        raise UserError(
            f"{quoted} is neither a folder here nor a dataset at {endpoint}; a private dataset needs HF_TOKEN"
        ) from error
    except Exception as error:  # of the HTTP library, which differs between versions of huggingface_hub
        raise UserError(_unreachable(quoted, endpoint, error)) from error
    if any(each.rfilename == f"{name.split('/')[-1]}.py" for each in info.siblings or ()):
        raise _script_error(quoted)
    return info.sha


def _unreachable(what: str, endpoint: str, error: BaseException) -> str:
    return (
        f"{what}: {endpoint} cannot be reached ({one_line(error, 300)}); pass a folder with the dataset's files, as "
        "`hf download NAME --repo-type dataset --local-dir FOLDER` writes, or set HF_ENDPOINT to a mirror"
    )


def _script_error(quoted: str) -> UserError:
    return UserError(
        f"{quoted} has a loading script, but fmoe never runs a dataset's code: pass a folder with its data files, or "
        "NAME@refs/convert/parquet for a dataset on the Hub"
    )


def _quoted(dataset: Dataset) -> str:
    return f"dataset={printable(dataset.name)!r}"


@contextlib.contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Convert any error of the ``with`` block to a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # `datasets` and the libraries below it share no base class of errors
        if isinstance(error, ConnectionError):
            from datasets import config

            raise UserError(_unreachable(what, config.HF_ENDPOINT, error)) from error
        raise UserError(f"{what} cannot be read: {one_line(error, 300)}") from error
