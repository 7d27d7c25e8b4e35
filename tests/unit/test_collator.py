"""LongContextCollator: whole documents in sequences of one length, and where every token went."""

from collections import Counter
from itertools import count, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import usp.data
from tests.unit.strategies import examples
from usp.batch import shard_batch
from usp.data.collator import LongContextCollator, Packed
from usp.errors import InputError
from usp.topology import Topology

PAD, SEP = 98, 99


def documents_of(packed: Packed) -> list[list[list[int]]]:
    """The documents of every sequence, padding left out."""
    found = []
    for batch in packed.batches:
        ends, ids = batch["cu_seqlens"], batch["input_ids"][0].tolist()
        pieces = [ids[a:b] for a, b in pairwise(ends)]
        found.append([piece for piece in pieces if set(piece) != {PAD}])
    return found


def test_by_hand():
    """Lengths with separators 4, 3, 6, 2 in sequences of 8: 4 + 3, then 6 + 2."""
    packed = LongContextCollator(8, separator=SEP, pad=PAD)([[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]])
    first, second = packed.batches
    assert first["input_ids"].tolist() == [[1, 2, 3, SEP, 4, 5, SEP, PAD]]
    assert first["labels"].tolist() == [[1, 2, 3, SEP, 4, 5, SEP, -100]]
    assert first["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert first["cu_seqlens"] == (0, 4, 7, 8)
    assert second["input_ids"].tolist() == [[6, 7, 8, 9, 10, SEP, 11, SEP]]
    assert second["cu_seqlens"] == (0, 6, 8)
    assert packed[1:] == (1, 0, 0)
    assert str(packed) == "2 sequences: 1 padding, 0 dropped, 0 carried"


def test_a_document_goes_where_there_is_room():
    """6, then 5 that does not fit, then 2 that fits behind the 6."""
    packed = LongContextCollator(8, pad=PAD)([[1] * 6, [2] * 5, [3] * 2])
    assert documents_of(packed) == [[[1] * 6, [3] * 2], [[2] * 5]]
    assert packed.padded == 3


def test_what_shard_batch_makes_of_it():
    """The same documents, no target over a border or of padding, the count of what can be predicted."""
    (batch,) = LongContextCollator(10, separator=SEP, pad=PAD)([[1, 2, 3], [4, 5]]).batches
    shard = shard_batch(batch, Topology.build())
    assert shard["cu_seqlens"] == batch["cu_seqlens"] == (0, 4, 7, 10)
    assert shard["shift_labels"].tolist() == [[2, 3, SEP, -100, 5, SEP, -100, -100, -100, -100]]
    assert torch.equal(shard["position_ids"], batch["position_ids"])
    without = {name: value for name, value in batch.items() if name != "cu_seqlens"}
    assert shard_batch(without, Topology.build())["cu_seqlens"] == (0, 4, 7, 10)


def test_the_tail():
    documents = [[1] * 5, [2] * 4, [3] * 3]  # 5 + 3, and 4 that do not fill theirs
    pad, drop, carry = (LongContextCollator(8, tail=tail, pad=PAD) for tail in ("pad", "drop", "carry"))
    assert documents_of(pad(documents)) == [[[1] * 5, [3] * 3], [[2] * 4]]
    assert documents_of(drop(documents)) == documents_of(carry(documents)) == [[[1] * 5, [3] * 3]]
    assert pad(documents)[1:] == (4, 0, 0)
    assert drop(documents)[1:] == (0, 4, 0)
    assert carry([])[1:] == (0, 0, 4)
    assert documents_of(carry([[4] * 4])) == [[[2] * 4, [4] * 4]]
    assert carry.flush() == Packed([], 0, 0, 0)
    assert documents_of(drop([[1] * 8])) == [[[1] * 8]]  # full, and no tail


def test_flush_gives_what_is_carried():
    collator = LongContextCollator(8, tail="carry", pad=PAD)
    assert collator([[1, 2]]) == Packed([], 0, 0, 2)
    assert collator([[3]]) == Packed([], 0, 0, 3)
    packed = collator.flush()
    assert documents_of(packed) == [[[1, 2], [3]]] and packed[1:] == (5, 0, 0)
    assert collator.flush().batches == []


def test_long_documents():
    """9 tokens and a separator in sequences of 4: 4, 4 and 2."""
    with pytest.raises(InputError, match=r"document 1 has 10 tokens and a sequence 4: .*long_documents='split'"):
        LongContextCollator(4, separator=SEP)([[1], list(range(9))])
    packed = LongContextCollator(4, separator=SEP, long_documents="split", pad=PAD)([list(range(9)), [50]])
    assert documents_of(packed) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, SEP], [50, SEP]]]
    assert packed.batches[2]["position_ids"].tolist() == [[0, 1, 0, 1]]
    LongContextCollator(4)([[1] * 4])  # exactly as long is not longer


def test_a_refused_call_leaves_what_is_carried():
    collator = LongContextCollator(4, tail="carry", pad=PAD)
    collator([[1, 2]])
    with pytest.raises(InputError):
        collator([[3], [4] * 5])
    assert documents_of(collator([[5, 6]])) == [[[1, 2], [5, 6]]]


def test_separators():
    """Added where the document has none at its end, and not to an empty document."""
    packed = LongContextCollator(8, separator=SEP, pad=PAD)([[1], [2, SEP], [], [SEP, 3]])
    assert documents_of(packed) == [[[1, SEP], [2, SEP], [SEP, 3, SEP]]]


@pytest.mark.parametrize(
    "tokenizer",
    [
        str.encode,
        lambda text: list(text.encode()),
        lambda text: {"input_ids": list(text.encode()), "attention_mask": [1] * len(text)},
        lambda text: {"input_ids": torch.tensor(list(text.encode()), dtype=torch.int32)},
    ],
    ids=["bytes", "list", "mapping", "tensor"],
)
def test_any_tokenizer(tokenizer):
    packed = LongContextCollator(8, tokenizer, separator=0, pad=PAD)(["abc", "de"])
    assert documents_of(packed) == [[[97, 98, 99, 0], [100, 101, 0]]]
    assert packed.batches[0]["input_ids"].dtype == torch.int64


def test_a_tokenizer_of_transformers():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "long": 1, "context": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    packed = LongContextCollator(8, tokenizer, separator=SEP, pad=PAD)(["a long context", "context long", ""])
    assert documents_of(packed) == [[[0, 1, 2, SEP], [2, 1, SEP]]]


@pytest.mark.parametrize("make", [tuple, torch.tensor, bytes, lambda x: torch.tensor(x, dtype=torch.uint8), range])
def test_any_kind_of_tokens(make):
    documents = [range(3), range(2)] if make is range else [make([0, 1, 2]), make([0, 1])]
    assert documents_of(LongContextCollator(5)(documents)) == [[[0, 1, 2], [0, 1]]]


@pytest.mark.parametrize("tail", ["pad", "drop", "carry"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@given(data=st.data(), length=st.integers(1, 12), separator=st.sampled_from([None, SEP]))
@examples(100)
def test_no_token_is_lost_or_invented(tail, split, data, length, separator):
    """Over several calls. Tokens are numbered, so that each is known wherever it turns up."""
    end = [] if separator is None else [separator]
    sizes = st.integers(0, 3 * length if split else length - len(end))
    numbers, given_pieces, results = count(1000), Counter(), []
    options = {"long_documents": "split" if split else "error", "pad": -1}
    collator = LongContextCollator(length, separator=separator, tail=tail, **options)
    for call in data.draw(st.lists(st.lists(sizes, max_size=6), max_size=4)):
        documents = [[next(numbers) for _ in range(n)] for n in call]
        before = results[-1].carried if results else 0
        packed = collator(documents)
        results.append(packed)
        ended = [document + end for document in documents if document]
        accounted = length * len(packed.batches) - packed.padded + packed.dropped + packed.carried
        assert before + sum(map(len, ended)) == accounted
        assert tail == "drop" or packed.dropped == 0
        assert tail == "carry" or packed.carried == 0
        assert packed.dropped < length and packed.carried < length  # of one sequence, the tail
        # Whole, or in pieces of `length`: nothing else is ever cut.
        given_pieces.update(tuple(text[i : i + length]) for text in ended for i in range(0, len(text), length))
    results.append(collator.flush())

    found, padded = Counter(), 0
    for batch in (batch for packed in results for batch in packed.batches):
        ids, labels, positions = (batch[name][0].tolist() for name in ("input_ids", "labels", "position_ids"))
        ends = batch["cu_seqlens"]
        assert len(ids) == length and ends[0] == 0 and ends[-1] == length
        for a, b in pairwise(ends):
            assert positions[a:b] == list(range(b - a))
            if ids[a] == -1:
                assert b == length and set(ids[a:]) == {-1} and set(labels[a:]) == {-100}
                padded += b - a
            else:
                assert labels[a:b] == ids[a:b]
                found[tuple(ids[a:b])] += 1
    missing = given_pieces - found
    assert found <= given_pieces
    assert padded == sum(packed.padded for packed in results)
    assert sum(len(piece) * n for piece, n in missing.items()) == sum(packed.dropped for packed in results)


def test_the_same_documents_give_the_same_sequences():
    documents = [torch.randint(90, (n,)) for n in (5, 9, 2, 7, 3, 3, 8)]
    one, two = (LongContextCollator(11, separator=SEP, tail="carry")(documents) for _ in range(2))
    assert documents_of(one) == documents_of(two) and one[1:] == two[1:]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader(workers):
    documents = [[1] * 5, [2] * 4, [3] * 3, [4] * 8]
    loader = DataLoader(documents, batch_size=3, collate_fn=LongContextCollator(8, pad=PAD), num_workers=workers)  # pyright: ignore[reportArgumentType]
    first, second = loader
    assert documents_of(first) == [[[1] * 5, [3] * 3], [[2] * 4]] and first.padded == 4
    assert documents_of(second) == [[[4] * 8]] and second.padded == 0


def test_a_worker_may_not_carry():
    loader = DataLoader([[1] * 5], collate_fn=LongContextCollator(8, tail="carry"), num_workers=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="num_workers=0"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 0}, "length is 0"),
        ({"tail": "keep"}, "tail is 'keep': it must be 'pad', 'drop' or 'carry'"),
        ({"long_documents": "cut"}, "long_documents is 'cut': it must be 'error' or 'split'"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(InputError, match=words):
        LongContextCollator(**{"length": 8} | options)


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ("abc", r"give \[document\]"),
        (["abc"], "document 0 is a text and there is no tokenizer"),
        ([[1], [1.5, 2]], r"document 1 is torch.float32 of shape \(2,\)"),
        ([[[1, 2]]], r"document 0 is torch.int64 of shape \(1, 2\)"),
        ([torch.tensor([True])], "document 0 is torch.bool"),
    ],
)
def test_what_is_no_document(documents, words):
    with pytest.raises(InputError, match=words):
        LongContextCollator(8)(documents)


def test_the_package_names_it():
    assert usp.data.LongContextCollator is LongContextCollator and usp.data.Packed is Packed
    with pytest.raises(AttributeError, match="no attribute 'Collator'"):
        usp.data.Collator  # noqa: B018
