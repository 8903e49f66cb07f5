"""Trains a tokenizer on pairs of sentences, and encodes the pairs as tensors for a model."""

from collections.abc import Iterable

import pairs
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def word_pieces(known: Iterable[pairs.Pair]) -> PreTrainedTokenizerBase:
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
    known: Iterable[pairs.Pair], tokenizer: PreTrainedTokenizerBase, length: int
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
