"""Pairs of sentences with equal or different meaning, and a tokenizer for them.

The files have the format of MRPC, the Microsoft Research Paraphrase Corpus. :func:`read` reads the
files of the corpus or of GLUE. :func:`write` writes generated pairs, which a small model learns in
minutes: news of companies, paraphrased or denied.
"""

import csv
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

COLUMNS = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
# The file names of the two parts in GLUE and in the corpus.
FILES = {
    "train": ["train.tsv", "msr_paraphrase_train.txt"],
    "dev": ["dev.tsv", "msr_paraphrase_test.txt"],
}

COMPANIES = "Acme Borealis Cobalt Dynamo Everest Fathom Granite Helix".split()
# Each line has several paraphrases of one piece of news.
NEWS = [
    ["has raised its forecast", "expects higher earnings", "sees profit growing"],
    ["has cut hundreds of jobs", "laid off many workers", "dismissed part of its staff"],
    ["has named a new chief executive", "chose another head", "has a different boss"],
    ["has opened a plant in Spain", "started a Spanish factory", "produces near Madrid"],
    ["has lost a patent lawsuit", "was found to infringe patents", "failed in a patent court"],
    ["has recalled its latest phone", "took back handsets", "withdrew a mobile device"],
]
SAYS = ["said", "confirmed", "announced", "reported"]
DENIES = ["denied", "disputed", "rejected the claim"]
TIMES = ["on Monday", "on Friday", "last week", "in July", "this morning"]
FORMS = ["{who} {says} {when} that it {what} .", "{when} {who} {says} that it {what} ."]


class Pair(NamedTuple):
    """Two sentences, and whether they have the same meaning."""

    first: str
    second: str
    same: bool


def path_of(folder: str, part: str) -> Path:
    """The file of a part. Raises ValueError if there is none."""
    paths = [Path(folder, name) for name in FILES[part]]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ValueError(f"{folder} has no {' or '.join(FILES[part])}")
    return path


def read(folder: str, part: str) -> list[Pair]:
    """Reads the pairs of a part, ``"train"`` or ``"dev"``.

    Raises:
        ValueError: the file does not exist, or a line has a wrong format.
    """
    path = path_of(folder, part)
    pairs = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        # Quotation marks are part of the sentences.
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        if next(rows, None) != COLUMNS:
            raise ValueError(f"{path} must begin with the columns {', '.join(COLUMNS)}")
        for number, row in enumerate(rows, 2):
            if len(row) != len(COLUMNS) or row[0] not in ("0", "1"):
                raise ValueError(
                    f"{path}, line {number} must have 0 or 1, two numbers and two sentences"
                )
            pairs.append(Pair(row[3], row[4], row[0] == "1"))
    if not pairs:
        raise ValueError(f"{path} has no pairs")
    return pairs


def write(folder: str, train: int, dev: int) -> None:
    """Writes ``train`` generated pairs for training and ``dev`` for tests, the same every time."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    source = random.Random(0)
    for part, number in (("train", train), ("dev", dev)):
        with Path(folder, FILES[part][0]).open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, lineterminator="\n")
            rows.writerow(COLUMNS)
            for index in range(number):
                first, second, same = made_up(source)
                rows.writerow([int(same), 2 * index, 2 * index + 1, first, second])


def made_up(source: random.Random) -> Pair:
    """Generates a pair about one piece of news. As in the corpus, two of three mean the same."""
    who, news, same = source.choice(COMPANIES), source.choice(NEWS), source.random() < 2 / 3
    ways = [SAYS, SAYS if same else DENIES]
    source.shuffle(ways)
    first, second = (
        source.choice(FORMS).format(
            who=who,
            says=source.choice(says),
            when=source.choice(TIMES),
            what=source.choice(news),
        )
        for says in ways
    )
    return Pair(first, second, same)


def word_pieces(known: Iterable[Pair]) -> PreTrainedTokenizerBase:
    """A tokenizer like BERT's, with the word pieces of the sentences in ``known``."""
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    pieces = Tokenizer(models.WordPiece(unk_token=special["unk"]))
    pieces.normalizer = normalizers.BertNormalizer()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    sentences = (sentence for pair in known for sentence in pair[:2])
    trainer = trainers.WordPieceTrainer(
        vocab_size=8000, special_tokens=list(special.values()), show_progress=False
    )
    pieces.train_from_iterator(sentences, trainer)
    ends = [(special[name], pieces.token_to_id(special[name])) for name in ("sep", "cls")]
    pieces.post_processor = processors.BertProcessing(*ends)
    names = {f"{name}_token": token for name, token in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=pieces, **names)


def encoded(
    known: Iterable[Pair], tokenizer: PreTrainedTokenizerBase, length: int
) -> list[dict[str, torch.Tensor]]:
    """Encodes each pair as a dictionary of tensors with ``length`` tokens."""
    first, second, same = zip(*known, strict=True)
    tokens = tokenizer(
        list(first),
        list(second),
        padding="max_length",
        truncation=True,
        max_length=length,
        return_token_type_ids=True,
        return_tensors="pt",
    )
    columns = {**tokens, "labels": torch.tensor(same, dtype=torch.long)}
    return [{name: column[row] for name, column in columns.items()} for row in range(len(same))]
