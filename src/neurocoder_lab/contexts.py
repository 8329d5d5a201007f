"""What the modules of a word model are invoked on: the words, their classes, and what the one tells about the other.

A module is invoked on the word that is read, to predict the one that follows. Classes of words, the first that fits: a
number, the end of a sentence (a new one follows), the definite article (a noun or adjective follows), a rare word, any
other. What the module tells about the class is mutual information, as a share of the class's entropy.

Shapes: B streams, L words of each.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from neurocoder_lab.attention import information, table
from neurocoder_lab.data import END

NUMBER, ARTICLE, UNKNOWN = "N", "the", "<unk>"
COMMON = 1000  # words, the most frequent, that are not rare
CLASSES = ("number", "end of sentence", "the", "rare", "other")
WORDS, EXAMPLES = 5, 3


def look(chosen_BL: Tensor, text_BL: Tensor, vocabulary: tuple[str, ...]) -> dict[str, Any]:
    """Numbers, and a row for each module; chosen at all words of the text but the last of each stream."""
    word_BL = text_BL[:, :-1]
    class_BL = classes(word_BL, vocabulary)
    modules = int(chosen_BL.max()) + 1
    counts_MC = table(chosen_BL.flatten(), class_BL.flatten(), modules, len(CLASSES))
    order = torch.randperm(chosen_BL.numel(), generator=torch.Generator().manual_seed(0))
    shuffled_MC = table(chosen_BL.flatten()[order], class_BL.flatten(), *counts_MC.shape)
    rows = []
    for module in range(modules):
        mine_BL = chosen_BL == module
        count = int(mine_BL.sum())
        if count:
            shares = (100 * counts_MC[module] / count).round().int().tolist()
            kinds = ", ".join(f"{name} {share}" for name, share in zip(CLASSES, shares, strict=True) if share)
            common = [vocabulary[n] for n, _ in Counter(word_BL[mine_BL].tolist()).most_common(WORDS)]
            context = " · ".join(_examples(mine_BL, text_BL, vocabulary))
            share = f"{100 * count / mine_BL.numel():.1f}"
            rows.append([module + 1, share, kinds, " ".join(common), context])
    return {
        "context_information": information(counts_MC),
        "context_information_shuffled": information(shuffled_MC),
        "invoked_on": rows,
    }


def classes(word_BL: Tensor, vocabulary: tuple[str, ...]) -> Tensor:
    """The class of every word, as its place in `CLASSES`."""
    special = {NUMBER: 0, END: 1, ARTICLE: 2, UNKNOWN: 3}
    of_word = [special.get(word, 3 if n >= COMMON else 4) for n, word in enumerate(vocabulary)]
    return torch.tensor(of_word)[word_BL]


def _examples(mine_BL: Tensor, text_BL: Tensor, vocabulary: tuple[str, ...]) -> list[str]:
    """Some of the places, spread over the text: the word that is read in brackets, one before it and one after."""
    places = mine_BL[:, 1:].nonzero()  # a word before it is there
    found = []
    for stream, place in places[:: max(1, len(places) // EXAMPLES)][:EXAMPLES].tolist():
        before, word, after = (vocabulary[n] for n in text_BL[stream, place : place + 3].tolist())
        found.append(f"{before} [{word}] {after}")
    return found
