"""Text as files of token numbers, mapped into memory, and batches of them.

A folder has ``train.bin`` and ``valid.bin``: token numbers of 16 bits (32 for a vocabulary of more
than 65,536), little-endian, one document after the other, each with an end token. ``tokens.json``
has the numbers of tokens, and ``tokenizer.json`` is the tokenizer of the library ``tokenizers``.
Other programs can write such folders, which need only these four files.
"""

import functools
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from absl import flags
from common.evaluation import IGNORED
from common.script import DEFINE_number, Stop, require, to_one_line
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

flags.DEFINE_string("data", None, "folder with tokens; created from --text if missing")
flags.DEFINE_string("text", None, "folder of .txt files; default: Python's own texts")
flags.DEFINE_string("tokenizer", None, "tokenizer.json to create --data; default: bytes")
flags.DEFINE_string("end_token", "<|endoftext|>", "token of --tokenizer between documents")
flags.DEFINE_integer("tokens_per_sample", None, "number of tokens of a sequence", lower_bound=1)
flags.DEFINE_integer("valid_samples", None, "validation sequences; default: all", 1)
flags.DEFINE_string("prompt", "The ", "beginning of the sample at the end; empty: none")
flags.DEFINE_integer("sample_tokens", 60, "number of tokens of the sample", lower_bound=1)
DEFINE_number("temperature", 0.0, "temperature of the sample; 0: the likeliest token", "[0, inf)")
for _name in ("data", "text", "tokenizer"):
    require(_name, bool, "is empty; give a file or folder")

END, BYTES = "<|endoftext|>", "runs/tokens"


class Tokens(NamedTuple):
    """The tokens of a folder, mapped into memory."""

    folder: str
    train: np.ndarray
    valid: np.ndarray
    vocabulary: int
    end: int  # the token after each document

    def tokenizer(self) -> Tokenizer:
        return open_tokenizer(os.path.join(self.folder, "tokenizer.json"))


def byte_level() -> Tokenizer:
    """A tokenizer with a token for each byte, and an end token; it supports any text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    return made


def prepare(options: SimpleNamespace, default: str | None = None) -> Tokens:
    """Returns the tokens of ``--data``; call it before the ranks start.

    A missing folder is created from ``--text``, with ``--tokenizer`` or the tokenizer in the file
    ``default``.
    """
    folder = options.data
    if not os.path.exists(os.path.join(folder, "tokens.json")):
        texts = texts_in(options.text) if options.text else shipped_texts()
        if file := options.tokenizer or default:
            write(folder, texts, open_tokenizer(file), options.end_token)
        else:
            write(folder, texts, byte_level(), END)
    elif options.text or options.tokenizer:
        raise Stop(
            f"{folder} has tokens already; leave out --{'text' if options.text else 'tokenizer'}, "
            "or give another --data",
            code=2,
        )
    training_rows, _ = open_rows(folder, options.tokens_per_sample)
    found = training_rows.found
    size = found.tokenizer().get_vocab_size()
    if size > found.vocabulary:
        raise Stop(
            f"{folder}/tokenizer.json has {size} tokens, but tokens.json has {found.vocabulary}: "
            "it is not their tokenizer",
            code=2,
        )
    return found


def shipped_texts() -> Iterator[str]:
    """Texts that are on every machine: Python's language reference and standard library."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def texts_in(folder: str) -> Iterator[str]:
    paths = sorted(Path(folder).rglob("*.txt"))
    if not paths:
        raise Stop(f"--text={folder} has no .txt files", code=2)
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Stop(f"--text={folder}: {path}: {to_one_line(error)}", code=2) from error


def write(folder: str, documents: Iterable[str], tokenizer: Tokenizer, mark: str) -> None:
    """Creates ``folder``; every 20th document is for validation. An error leaves no folder."""
    vocabulary, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(mark)
    if end is None:
        raise Stop(f"the tokenizer has no {mark!r} to put between documents; set --end_token", 2)
    parts: dict[str, list[np.ndarray]] = {"valid": [], "train": []}
    dtype = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
    for number, document in enumerate(text for text in documents if text.strip()):
        numbers = tokenizer.encode(document, add_special_tokens=False).ids
        part = "valid" if number % 20 == 19 else "train"
        parts[part].append(np.array([*numbers, end], dtype))
    if not parts["train"]:
        raise Stop(f"all texts for {folder} are empty; give others with --text", code=2)
    if not parts["valid"]:  # few documents: use the end of the last one
        last = parts["train"].pop()
        cut = len(last) - max(1, len(last) // 10)
        parts["train"].append(last[:cut])
        parts["valid"].append(last[cut:])
    counts = {name: sum(map(len, part)) for name, part in parts.items()}
    parent = os.path.dirname(os.path.abspath(folder))
    try:
        os.makedirs(parent, exist_ok=True)
        # Write into a temporary folder first: other hosts only see a complete folder.
        with tempfile.TemporaryDirectory(prefix=".tokens-", dir=parent) as temporary:
            new = Path(temporary, "tokens")
            new.mkdir()
            for name, part in parts.items():
                np.concatenate(part).tofile(new / f"{name}.bin")
            tokenizer.save(str(new / "tokenizer.json"))
            described = {
                "dtype": dtype.name,
                "vocabulary": vocabulary,
                "end": end,
                "tokens": counts,
            }
            (new / "tokens.json").write_text(json.dumps(described))
            try:
                os.rename(new, folder)
            except OSError:
                # Another process, perhaps on another host, may have created it meanwhile.
                if not os.path.exists(os.path.join(folder, "tokens.json")):
                    raise
    except OSError as error:
        raise Stop(f"--data={folder} cannot be written: {to_one_line(error)}", code=2) from error


def open_folder(folder: str) -> Tokens:
    """Opens the files; raises Stop if their lengths differ from ``tokens.json``."""
    path = os.path.join(folder, "tokens.json")
    try:
        described = json.loads(Path(path).read_text(encoding="utf-8"))
        dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[described["dtype"]])
        vocabulary, end = int(described["vocabulary"]), int(described["end"])
        counts = [int(described["tokens"][name]) for name in ("train", "valid")]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Stop(f"{path} does not describe tokens: {to_one_line(error)}", code=2) from error
    mapped = []
    for name, count in zip(("train.bin", "valid.bin"), counts, strict=True):
        file = os.path.join(folder, name)
        size = os.path.getsize(file) if os.path.exists(file) else 0
        if size != count * dtype.itemsize or not count:
            raise Stop(
                f"{file} has {size:,} bytes, not {count:,} tokens of {dtype.itemsize} bytes as in "
                "tokens.json; create or copy it again",
                code=2,
            )
        mapped.append(np.memmap(file, dtype, mode="r"))
    return Tokens(folder, *mapped, vocabulary, end)


def open_tokenizer(path: str) -> Tokenizer:
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library has no specific exception
        raise Stop(f"{path} is not a tokenizer: {to_one_line(error)}", code=2) from error


class Rows:
    """The ``part``, "train" or "valid", in rows of ``length`` + 1 tokens.

    The last token of a row is also the first token of the next one.
    """

    def __init__(self, found: Tokens, part: str, length: int) -> None:
        self.found, self.part, self.length = found, part, length
        self.tokens = getattr(found, part)
        if len(self.tokens) <= length:
            raise Stop(
                f"{found.folder}/{part}.bin has {len(self.tokens):,} tokens, too few for "
                f"--tokens_per_sample={length} and one more",
                code=2,
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, number: int) -> torch.Tensor:
        first = number * self.length
        row = self.tokens[first : first + self.length + 1].astype(np.int64)
        # On an XLA device a token number that is too large would silently be replaced by another.
        if row.max() >= self.found.vocabulary:
            raise Stop(
                f"{self.found.folder}/{self.part}.bin has token {row.max()} after place {first:,}, "
                f"beyond the vocabulary of {self.found.vocabulary}",
                code=2,
            )
        return torch.from_numpy(row)


def describe(held_out: Rows, count: int | None, form: str) -> dict[str, object]:
    """Describes the validation tokens for evaluate.py; ``form``: "pairs" or "packed"."""
    return {
        "kind": "tokens",
        "folder": os.path.abspath(held_out.found.folder),
        "length": held_out.length,
        "count": count,
        "rows": form,
    }


def encode_prompt(found: Tokens, options: SimpleNamespace) -> list[int]:
    """Encodes ``--prompt`` as tokens; an empty prompt has none."""
    numbers = found.tokenizer().encode(options.prompt, add_special_tokens=False).ids
    if len(numbers) >= options.tokens_per_sample:
        raise Stop(
            f"--prompt has {len(numbers)} tokens; it must be shorter than "
            f"--tokens_per_sample={options.tokens_per_sample}",
            code=2,
        )
    return numbers


def open_rows(folder: str | None, length: int) -> tuple[Rows, Rows]:
    """The training and the validation rows. Without a folder, for a plan, one row each."""
    row = np.zeros(length + 1, "<u2")
    found = open_folder(folder) if folder else Tokens("", row, row, vocabulary=1, end=0)
    return Rows(found, "train", length), Rows(found, "valid", length)


def training_batches(
    rows: Rows, size: int, rank: int, ranks: int, seed: int, done: int, batches: int
) -> Iterator[torch.Tensor]:
    """``batches`` of one rank, (``size``, length + 1) each, after ``done`` rows of all ranks.

    The order of rows is different in each epoch; it depends only on ``seed`` and the epoch.
    """

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + epoch)
        return torch.randperm(len(rows), generator=generator)

    for number in range(batches):
        first = done + (number * ranks + rank) * size
        places = (divmod(place, len(rows)) for place in range(first, first + size))
        yield torch.stack([rows[int(order(epoch)[index])] for epoch, index in places])


def validation_batches(
    rows: Rows, count: int | None, size: int, rank: int, ranks: int
) -> Iterator[torch.Tensor]:
    """Batches of the first ``count`` rows, as many on each rank; filled with rows of -1."""
    count = min(len(rows), count or len(rows))
    filling = torch.full((rows.length + 1,), -1)
    for first in range(0, count, size * ranks):
        places = range(first + rank * size, first + (rank + 1) * size)
        yield torch.stack([rows[place] if place < count else filling for place in places])


def pairs(batches: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Splits rows of length + 1 into tokens and labels, which are the next tokens."""
    for rows in batches:
        labels = rows[:, 1:]
        yield rows[:, :-1].clamp(min=0), labels.masked_fill(labels < 0, IGNORED)


def packed(batches: Iterable[torch.Tensor], end: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Like :func:`pairs`, with the document in the row and the position in it of each token.

    The first token of a document is not a label, because no token before it predicts it.
    """
    for tokens, labels in pairs(batches):
        after_end = torch.nn.functional.pad(tokens[:, :-1] == end, (1, 0))
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        first = torch.where(after_end, places, 0).cummax(1).values
        segments = after_end.cumsum(1)
        yield tokens, labels.masked_fill(tokens == end, IGNORED), segments, places - first
