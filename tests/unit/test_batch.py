"""shard_batch: what every rank gets, what is refused, and that a sharded step has the gradients of a whole one."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import usp
from tests.dense import relative_error
from tests.unit.strategies import boundaries, examples, layout_names
from usp.agreement import Options
from usp.batch import check_batch, shard_batch
from usp.data.collator import LongContextCollator
from usp.errors import AgreementError, InputError
from usp.placement import place
from usp.topology import assemble
from usp.transports import local

pytestmark = pytest.mark.filterwarnings("ignore:causal attention over a ring")

LAYOUTS = ("contiguous", "zigzag", "striped")
ONE = usp.Topology.build()


def grid(ulysses: int, ring: int, data: int = 1) -> list[usp.Topology]:
    """Every rank's topology, without anything to communicate by: shard_batch needs none."""
    ranks = ulysses * ring * data
    grids = place(["here"] * ranks, ulysses, ring)
    return [assemble(r, grids, ("here",) * ranks, None, lambda *_: None, Options()) for r in range(ranks)]


def tokens(rows: int, seq_len: int) -> Tensor:
    return torch.arange(rows * seq_len).reshape(rows, seq_len)


def counting(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


# ---- what every rank gets --------------------------------------------------------------------------------------------


def test_by_hand():
    """7 tokens over 4 ranks, documents of 3 and 4: shards of 2, 2, 2, 1; ranks 0 and 1 share a document's end."""
    batch = {"input_ids": torch.tensor([[10, 11, 12, 20, 21, 22, 23]]), "labels": torch.tensor([[0, 1, 2, 3, 4, 5, 6]])}
    shards = [shard_batch({**batch, "cu_seqlens": [0, 3, 7]}, t) for t in grid(2, 2)]
    assert [s["input_ids"].tolist() for s in shards] == [[[10, 11]], [[12, 20]], [[21, 22]], [[23]]]
    assert [s["position_ids"].tolist() for s in shards] == [[[0, 1]], [[2, 0]], [[1, 2]], [[3]]]
    assert [s["shift_labels"].tolist() for s in shards] == [[[1, 2]], [[-100, 4]], [[5, 6]], [[-100]]]
    for s in shards:
        assert s["labels"] is s["shift_labels"]
        assert (s["seq_len"], s["cu_seqlens"]) == (7, (0, 3, 7))
        assert list(s) == ["input_ids", "labels", "shift_labels", "position_ids", "seq_len", "cu_seqlens"]


def test_the_order_of_zigzag():
    """Ring rank 0 of 2 holds the first and the last quarter."""
    first, second = (shard_batch({"input_ids": tokens(1, 8)}, t, "zigzag") for t in grid(1, 2))
    assert first["position_ids"].tolist() == first["input_ids"].tolist() == [[0, 1, 6, 7]]
    assert second["position_ids"].tolist() == second["input_ids"].tolist() == [[2, 3, 4, 5]]
    assert "labels" not in first and "cu_seqlens" not in first


@given(data=st.data(), layout=layout_names, seq_len=st.integers(1, 30), rows=st.integers(1, 2))
@examples(60)
def test_every_token_is_somewhere_with_its_own_target(data, layout, seq_len, rows):
    """Token by token, from the definitions; an input id is its token's place in the whole batch."""
    ulysses, ring = data.draw(st.sampled_from([(1, 1), (2, 2), (1, 3), (4, 1)]))
    ends = data.draw(boundaries(seq_len))
    start = data.draw(st.integers(0, seq_len - 1))
    real = range(start, data.draw(st.integers(start + 1, seq_len)))
    ids = tokens(rows, seq_len)
    labels, weights = ids + 1000, ids / 7.0 + 1.0
    mask = torch.zeros(rows, seq_len, dtype=torch.int64)
    mask[:, real.start : real.stop] = 1
    batch = {"input_ids": ids, "labels": labels, "loss_weights": weights, "attention_mask": mask, "cu_seqlens": ends}

    document, count = [], []
    for i in range(seq_len):  # padding is a document, cut off on both sides; other documents as given
        document.append("before" if i < real.start else "after" if i >= real.stop else sum(e <= i for e in ends))
        count.append(count[-1] + 1 if i and document[i] == document[i - 1] else 0)
    seen = []
    for topology in grid(ulysses, ring):
        shard = shard_batch(batch, topology, layout)
        borders = [i for i in range(1, seq_len) if document[i] != document[i - 1]]
        assert shard.get("cu_seqlens") == ((0, *borders, seq_len) if borders else None)
        assert "attention_mask" not in shard
        for name in ("position_ids", "shift_labels", "loss_weights"):
            assert shard[name].shape == shard["input_ids"].shape
        each = (shard[n].flatten().tolist() for n in ("input_ids", "position_ids", "shift_labels", "loss_weights"))
        for token, position, target, weight in zip(*each, strict=True):
            i = token % seq_len
            has_target = i in real and i + 1 < seq_len and document[i + 1] == document[i]
            assert position == count[i]
            assert target == (token + 1001 if has_target else -100)
            assert weight == pytest.approx((token + 1) / 7 + 1 if has_target else 0)
            seen.append(token)
    assert sorted(seen) == ids.flatten().tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unshard_gives_the_batch_back(layout):
    """Bit by bit, whatever the dtype, the number of dimensions and the length."""
    batch = {"input_ids": tokens(2, 13), "embedding": torch.randn(13, 2, 3), "seen": torch.rand(2, 5, 13) > 0.5}

    def work(topology):
        shard = shard_batch(batch, topology, layout, sequence_dims={"embedding": 0, "seen": -1})
        dims = {"input_ids": 1, "embedding": 0, "seen": 2}
        return {n: usp.unshard(shard[n], topology, dim=d, layout=layout, length=13) for n, d in dims.items()}

    for whole in local.run(work, ulysses_degree=2, ring_degree=2):
        for name, value in whole.items():
            assert value.dtype == batch[name].dtype and torch.equal(value, batch[name])


@pytest.mark.parametrize(
    "position_ids",
    [counting(4, 3), counting(4, 3).expand(2, 7), counting(4, 3).expand(1, 7), counting(4, 3).expand(3, 2, 7),
     counting(4, 3).expand(4, 1, 7)],
    ids=["S", "BS", "1S", "3BS", "41S"],
)  # fmt: skip
def test_positions_are_cut_in_any_shape_and_tell_the_documents(position_ids):
    batch = {"input_ids": tokens(2, 7), "position_ids": position_ids}
    shards = [shard_batch(batch, t) for t in grid(4, 1)]
    assert torch.equal(torch.cat([s["position_ids"] for s in shards], -1), position_ids)
    assert {s["cu_seqlens"] for s in shards} == {(0, 4, 7)}


def test_mrope_positions_of_an_image_are_no_documents():
    """Qwen2-VL: text 0, 1; a 2 x 2 image; text goes on at the largest position + 1. Then the same again."""
    document = torch.tensor([[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]])
    image_first = torch.tensor([[0, 0, 0, 0, 2], [0, 0, 1, 1, 2], [0, 1, 0, 1, 2]])
    position_ids = torch.cat((document, image_first, document), 1).unsqueeze(1)
    shard = shard_batch({"input_ids": tokens(1, 19), "position_ids": position_ids}, ONE)
    assert shard["cu_seqlens"] == (0, 7, 12, 19)
    assert torch.equal(shard["position_ids"], position_ids)


def test_boundaries_that_are_given_decide():
    """Positions may then be any: here they skip ahead inside a document."""
    positions = torch.tensor([[0, 1, 50, 51, 0, 9]])
    shard = shard_batch({"input_ids": tokens(1, 6), "position_ids": positions, "cu_seqlens": [0, 4, 6]}, ONE)
    assert shard["cu_seqlens"] == (0, 4, 6) and torch.equal(shard["position_ids"], positions)
    for one in ([0, 6], torch.tensor([0, 6], dtype=torch.int32)):
        assert "cu_seqlens" not in shard_batch({"input_ids": tokens(1, 6), "cu_seqlens": one}, ONE)


def test_the_words_of_transformers():
    """cu_seq_lens_q and _k, of length S here: they are boundaries, not something to cut; entries that are None."""
    ends = torch.tensor([0, 2, 3], dtype=torch.int32)
    batch = {"input_ids": tokens(1, 3), "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 2, "labels": None}
    shard = shard_batch(batch, ONE)
    assert shard["cu_seqlens"] == (0, 2, 3) and shard["max_length_q"] == 2
    assert not {"cu_seq_lens_q", "cu_seq_lens_k", "labels"} & set(shard)


def test_a_batch_encoding():
    """transformers' BatchEncoding is no dict."""
    encoding = pytest.importorskip("transformers").BatchEncoding(
        {"input_ids": [[5, 6, 7, 0]], "attention_mask": [[1, 1, 1, 0]]}, tensor_type="pt"
    )
    shard = shard_batch(encoding, grid(1, 2)[0])
    assert shard["input_ids"].tolist() == [[5, 6]] and shard["cu_seqlens"] == (0, 3, 4)
    assert encoding["attention_mask"].tolist() == [[1, 1, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1] * 6, None),
        ([1, 1, 1, 1, 0, 0], (0, 4, 6)),
        ([0, 0, 1, 1, 1, 1], (0, 2, 6)),
        ([0, 1, 1, 1, 1, 0], (0, 1, 5, 6)),
    ],
)
def test_padding_is_a_document(mask, expected, dtype):
    batch = {"input_ids": tokens(2, 6), "attention_mask": torch.tensor([mask, mask]).to(dtype)}
    shard = shard_batch(batch, ONE)
    assert shard.get("cu_seqlens") == expected


def test_left_padding_with_the_positions_of_transformers():
    """They are 1 on padding, as in `generate`; documents are read from real tokens only."""
    batch = {
        "input_ids": tokens(1, 8),
        "position_ids": torch.tensor([[1, 1, 1, 0, 1, 2, 0, 1]]),
        "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]),
    }
    assert shard_batch(batch, ONE)["cu_seqlens"] == (0, 3, 6, 8)


def test_targets_that_are_shifted_already_stay():
    """As a window of a text one token longer gives them: the last has a target too, and weights go with targets."""
    batch = {"input_ids": tokens(1, 5), "shift_labels": tokens(1, 5) + 1, "loss_weights": tokens(1, 5) * 0.5}
    shards = [shard_batch(batch, t) for t in grid(2, 1)]
    assert [s["labels"].tolist() for s in shards] == [[[1, 2, 3]], [[4, 5]]]
    assert [s["loss_weights"].tolist() for s in shards] == [[[0, 0.5, 1]], [[1.5, 2]]]
    padded = shard_batch({**batch, "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}, ONE, ignore_index=-1)
    assert padded["shift_labels"].tolist() == [[1, 2, 3, -1, -1]]
    assert padded["loss_weights"].tolist() == [[0, 0.5, 1, 0, 0]]


def test_the_rest_is_passed_on():
    rest = {"name": "a text", "step": 3, "t": torch.tensor(0.5), "pixels": torch.zeros(2, 3), "sizes": [1, 2, 3]}
    shard = shard_batch({"input_ids": tokens(2, 6), **rest}, grid(1, 2)[1])
    assert all(shard[name] is value for name, value in rest.items())
    pixels = torch.zeros(2, 6)
    shard = shard_batch({"input_ids": tokens(2, 6), "pixels": pixels}, ONE, sequence_dims={"pixels": None})
    assert shard["pixels"] is pixels


def test_embeddings_instead_of_tokens():
    first, _ = (shard_batch({"inputs_embeds": torch.zeros(2, 5, 8)}, t) for t in grid(1, 2))
    assert first["inputs_embeds"].shape == (2, 3, 8)
    assert first["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_the_batch_is_left_as_it_is():
    batch = {"input_ids": tokens(1, 4), "labels": tokens(1, 4), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    before = deepcopy(batch)
    shard = shard_batch(batch, ONE)
    shard["labels"].zero_()
    assert list(batch) == list(before) and all(torch.equal(batch[n], before[n]) for n in batch)


def test_the_sampler_deals_by_grid():
    """8 ranks in grids of 4: the first four take the same samples, the others the others."""
    ranks = grid(2, 2, data=2)
    assert [t.data_rank for t in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {t.data_degree for t in ranks} == {2}


# ---- what is refused -------------------------------------------------------------------------------------------------

IDS = {"input_ids": tokens(2, 6)}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"position_ids": counting(6) + 6}, r"position_ids are \(6, 7, .*give cu_seqlens too.*cut already"),
        ({"position_ids": torch.tensor([0, 1, 2, 9, 10, 11])}, r"are \(2, 9, 10, 11\) from token 2 of row 0 on"),
        ({"position_ids": torch.tensor([0, 1, 1, 2, 3, 4])}, r"are \(1, 1, 2, 3, 4\) from token 1 of row 0 on"),
        ({"position_ids": (counting(6) + 1).expand(3, 2, 6)}, r"from token 0 of row 0 on"),
        ({"position_ids": counting(5)}, r"position_ids has shape \(5,\).*give \(6,\), \(2, 6\), or \(3, 2, 6\)"),
        ({"position_ids": counting(6).expand(3, 6)}, r"position_ids has shape \(3, 6\)"),
        ({"position_ids": counting(6).expand(1, 3, 2, 6)}, r"position_ids has shape"),
        ({"cu_seqlens": (0, 3)}, r"documents add up to 3 tokens and the global sequence has 6"),
        ({"cu_seqlens": (0, 3, 3, 6)}, r"must start at 0 and ascend"),
        ({"cu_seqlens": ()}, r"hold no document"),
        ({"cu_seqlens": torch.tensor([[0, 6], [0, 5]])}, r"add up to 5 tokens"),
        ({"cu_seqlens": [[0, 6]] * 3}, r"list of such for each of the 2 rows, got 3 entries"),
        ({"cu_seqlens": (0, 6), "cu_seq_lens_q": (0, 2, 6)}, r"differ: cu_seqlens is \(0, 6\); cu_seq_lens_q"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 0]] * 2)}, r"hides 1 tokens between others in row 0"),
        ({"attention_mask": torch.tensor([[1, 1, 2, 2, 3, 3]] * 2)}, r"holds 2 where it must be 1.*cu_seqlens"),
        ({"attention_mask": torch.zeros(2, 6)}, r"hides every token of row 0"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, r"shape \(2, 1, 6, 6\): only \(B, S\)"),
        ({"attention_mask": torch.ones(2, 7)}, r"attention_mask has shape \(2, 7\), and the tokens are 2 rows of 6"),
        ({"attention_mask": [[1] * 6] * 2}, r"attention_mask must be a tensor, got list: use return_tensors='pt'"),
        ({"labels": tokens(1, 6)}, r"labels has shape \(1, 6\)"),
        ({"labels": tokens(2, 6).unsqueeze(-1)}, r"labels has shape \(2, 6, 1\)"),
        ({"labels": tokens(2, 6), "shift_labels": tokens(2, 6)}, r"which are shifted here, and shift_labels"),
        ({"loss_weights": torch.ones(2, 6)}, r"no labels to weigh"),
        ({"input_ids": [[1, 2, 3]]}, r"input_ids must be a tensor, got list"),
        ({"input_ids": torch.zeros(6)}, r"must be \(B, S\)"),
        ({"input_ids": torch.zeros(1, 0)}, r"B and S above 0"),
        ({"input_ids": None}, r"neither input_ids nor inputs_embeds, it has nothing"),
        ({"seq_len": 24}, r"cut it already: give the whole batch, once"),
        ({"token_type_ids": tokens(2, 6)}, r"dimension 1 may be the sequence: .*sequence_dims=\{'token_type_ids': 1\}"),
        ({"scores": [[0.0] * 6] * 2}, r"scores has shape \(2, 6\).*\{'scores': None\}"),
    ],
)  # fmt: skip
def test_refusals(more, words):
    with pytest.raises(InputError, match=words):
        shard_batch({**IDS, **more}, ONE)


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ({"bias": 1}, r"'bias': 1, which is no dimension of 6 tokens: bias is a Tensor of shape \(6, 4\)"),
        ({"bias": 2}, r"'bias': 2, which is no dimension"),
        ({"bias": -3}, r"'bias': -3, which is no dimension"),
        ({"note": 0}, r"note is a str of shape \(\)"),
        ({"labels": 1}, r"'labels': shard_batch knows"),
        ({"scores": 1}, r"'scores': the batch has input_ids, bias, note"),
    ],
)
def test_wrong_sequence_dims(dims, words):
    with pytest.raises(InputError, match=words):
        shard_batch({**IDS, "bias": torch.zeros(6, 4), "note": "six"}, ONE, sequence_dims={"bias": 0} | dims)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shard_is_refused(layout):
    shard = shard_batch({**IDS, "labels": tokens(2, 6)}, grid(1, 2)[1], layout)
    with pytest.raises(InputError, match=r"seq_len=6, so shard_batch has cut it already"):
        shard_batch(shard, grid(1, 2)[1], layout)
    if layout != "striped":
        continue_at = {"input_ids": shard["input_ids"], "position_ids": shard["position_ids"]}
        with pytest.raises(InputError, match="if this batch was cut already"):
            shard_batch(continue_at, grid(1, 2)[1], layout)


def test_no_such_layout():
    with pytest.raises(InputError, match="zigzag"):
        shard_batch(IDS, ONE, "zagzig")


# ---- ranks that disagree ---------------------------------------------------------------------------------------------


def disagreement(batch_of_rank) -> str:
    with pytest.raises(AgreementError) as caught:
        local.run(lambda t: check_batch(batch_of_rank(t.rank), t), ulysses_degree=2, ring_degree=2, timeout_seconds=20)
    return str(caught.value)


def test_different_samples_are_named():
    ids = tokens(2, 5)
    swapped = {**IDS, "input_ids": ids.flip(1)}
    assert "rank 2 has input_ids (2, 5) of checksum" in disagreement(
        lambda rank: swapped if rank == 2 else {"input_ids": ids}
    )
    assert "rank 3 has input_ids (2, 6)" in disagreement(lambda rank: IDS if rank == 3 else {"input_ids": ids})
    assert "rank 1 has weights None" in disagreement(lambda rank: {"w" if rank == 1 else "weights": torch.ones(2)})


def test_equal_samples_pass_in_every_dtype():
    def work(topology):
        for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float64):
            check_batch({"x": torch.ones(3, 2).to(dtype), "scalar": torch.tensor(1.5), "name": object()}, topology)
        return True

    assert local.run(work, ulysses_degree=2) == [True, True]


def test_ranks_of_different_lengths_do_not_hang():
    def work(topology):
        shard = shard_batch({"input_ids": tokens(1, 16 if topology.rank else 17)}, topology)
        x = torch.zeros(1, shard["input_ids"].shape[1], 2, 4)
        usp.attention(x, x, x, topology=topology, seq_len=shard["seq_len"])

    with pytest.raises(AgreementError, match="rank 1 has seq_len 16 where rank 0 has 17"):
        local.run(work, ulysses_degree=2, ring_degree=2, timeout_seconds=20)


def test_the_whole_sequence_instead_of_the_shard_is_found():
    def work(topology):
        x = torch.zeros(1, 16, 2, 4)
        usp.attention(
            x, x, x, topology=topology, seq_len=shard_batch({"input_ids": tokens(1, 16)}, topology)["seq_len"]
        )

    with pytest.raises(InputError, match="looks like the whole sequence"):
        local.run(work, ulysses_degree=2, ring_degree=2, timeout_seconds=20)


# ---- a step --------------------------------------------------------------------------------------------------------


class TinyLM(nn.Module):
    """Two layers of causal attention with a learned embedding of every position: a wrong position is a wrong row."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(50, 16), nn.Embedding(longest, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))  # 4 query heads and 2 kv heads of 4
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor, positions: Tensor, attend) -> Tensor:
        x = self.token(ids) + self.position(positions)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).unflatten(-1, (8, 4)).split((4, 2, 2), dim=2)
            x = x + out(attend(q, k, v).flatten(2)).tanh()
        return self.head(x)


def attend_document(window: int):
    """Attention over one whole document: a query sees itself and the `window - 1` tokens before it."""

    def attend(q, k, v):
        i = torch.arange(q.shape[1])
        seen = (i[:, None] >= i) & (i[:, None] - i < window)
        q, k, v = (
            q.transpose(1, 2),
            k.repeat_interleave(2, 2).transpose(1, 2),
            v.repeat_interleave(2, 2).transpose(1, 2),
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

    return attend


def one_by_one(model: nn.Module, batch: dict, documents: list, window: int) -> tuple[Tensor, int, list[Tensor]]:
    """(loss, number of targets, gradients) of every row's documents run alone, shifted by hand, without usp.

    `documents` are those of all rows, or a list of those of each.
    """
    total, number = torch.zeros((), dtype=torch.float64), 0
    for row in range(batch["input_ids"].shape[0]):
        for d in documents if isinstance(documents[0], range) else documents[row]:
            ids, labels, weights = (batch[n][row, d.start : d.stop] for n in ("input_ids", "labels", "loss_weights"))
            logits = model(ids[None], torch.arange(len(d))[None], attend_document(window))[0]
            for i in range(len(d) - 1):
                if labels[i + 1] != -100:
                    total = total - weights[i + 1] * logits[i].log_softmax(-1)[labels[i + 1]]
                    number += 1
    grads = torch.autograd.grad(total / number, list(model.parameters()))
    return (total / number).detach(), number, list(grads)


def sharded(model: nn.Module, batch: dict, layout: str, window: int):
    """(loss, number of targets, gradients): each summed over four ranks, as an all-reduce would."""
    window_size = (window - 1, 0) if window < 10**6 else (-1, -1)

    def work(topology):
        copy, shard = deepcopy(model), shard_batch(batch, topology, layout)
        attention = usp.USPAttention(topology=topology, layout=layout)

        def attend(q, k, v):
            documents = {"cu_seqlens": shard["cu_seqlens"]} if "cu_seqlens" in shard else {}
            return attention(q, k, v, is_causal=True, window_size=window_size, seq_len=shard["seq_len"], **documents)

        logits = copy(shard["input_ids"], shard["position_ids"], attend)
        targets = shard["shift_labels"]
        losses = (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none") * shard["loss_weights"].flatten()
        )
        grads = torch.autograd.grad(losses.sum(), list(copy.parameters()))
        return losses.sum().detach(), int((targets != -100).sum()), grads

    losses, numbers, grads = zip(*local.run(work, ulysses_degree=2, ring_degree=2), strict=True)
    number = sum(numbers)
    return sum(losses) / number, number, [sum(parts) / number for parts in zip(*grads, strict=True)]


def draw(rows: int, seq_len: int) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seq_len)
    ids = torch.randint(50, (rows, seq_len), generator=make)
    labels = ids.masked_fill(torch.rand(rows, seq_len, generator=make) < 0.2, -100)
    return {"input_ids": ids, "labels": labels, "loss_weights": torch.rand(rows, seq_len, generator=make).double()}


def hide(seq_len: int, real: range) -> Tensor:
    return torch.tensor([[i in real for i in range(seq_len)]] * 2)


FAR = 10**9
STEPS = {
    "one document": ({}, [range(30)], FAR),
    "packed, by positions": ({"position_ids": counting(7, 23).expand(2, 30)}, [range(7), range(7, 30)], FAR),
    "packed, by boundaries": ({"cu_seqlens": (0, 1, 16, 30)}, [range(1), range(1, 16), range(16, 30)], FAR),
    "padded on the right": ({"attention_mask": hide(30, range(23))}, [range(23)], FAR),
    "two shards of padding": ({"attention_mask": hide(30, range(9))}, [range(9)], FAR),
    "padded on the left": ({"attention_mask": hide(30, range(5, 30))}, [range(5, 30)], FAR),
    "packed and padded": (
        {"position_ids": counting(11, 14, 5).expand(2, 30), "attention_mask": hide(30, range(25))},
        [range(11), range(11, 25)],
        FAR,
    ),
    "rows of other lengths": (
        {"attention_mask": torch.cat([hide(30, range(23))[:1], hide(30, range(2, 30))[:1]])},
        [[range(23)], [range(2, 30)]],
        FAR,
    ),
    "rows of other documents": (
        {"position_ids": torch.cat([counting(7, 23), counting(11, 14, 5)]).view(2, 30)},
        [[range(7), range(7, 30)], [range(11), range(11, 25), range(25, 30)]],
        9,
    ),
    "rows of other boundaries": ({"cu_seqlens": [[0, 30], (0, 4, 30)]}, [[range(30)], [range(4), range(4, 30)]], FAR),
    "a window longer than a shard": ({}, [range(32)], 16),
    "a window and documents": ({"cu_seqlens": (0, 19, 30)}, [range(19), range(19, 30)], 9),
    "seven tokens, padded to eight": ({"attention_mask": hide(8, range(7)), "cu_seqlens": (0, 8)}, [range(7)], FAR),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("case", STEPS)
def test_a_sharded_step_has_the_gradients_of_documents_run_alone(case, layout):
    more, documents, window = STEPS[case]
    every = documents if isinstance(documents[0], range) else [d for row in documents for d in row]
    seq_len = more["attention_mask"].shape[1] if "attention_mask" in more else max(d.stop for d in every)
    torch.manual_seed(0)
    model, batch = TinyLM(seq_len).double(), draw(2, seq_len)
    loss, number, grads = one_by_one(model, batch, documents, window)
    sharded_loss, sharded_number, sharded_grads = sharded(model, {**batch, **more}, layout, window)
    assert sharded_number == number
    assert relative_error(sharded_loss, loss) < 1e-12
    for (name, _), x, reference in zip(model.named_parameters(), sharded_grads, grads, strict=True):
        assert relative_error(x, reference) < 1e-12, name


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_step_on_what_the_collator_packs(layout):
    """Documents of lists, in sequences of 29 that are padded; every sequence is one sharded step."""
    make = torch.Generator().manual_seed(3)
    texts = [torch.randint(1, 50, (n,), generator=make).tolist() for n in (13, 20, 9, 5, 18)]
    torch.manual_seed(0)
    model = TinyLM(29).double()
    packed = LongContextCollator(29, separator=0)(texts)
    steps = [sharded(model, {**b, "loss_weights": torch.ones(1, 29).double()}, layout, FAR) for b in packed.batches]

    total, number = torch.zeros((), dtype=torch.float64), 0
    for text in texts:
        ids = torch.tensor([[*text, 0]])
        logits = model(ids, torch.arange(ids.shape[1])[None], attend_document(FAR))[0]
        total = total + F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
        number += len(text)
    grads = torch.autograd.grad(total / number, list(model.parameters()))
    assert sum(n for _, n, _ in steps) == number == 65
    assert relative_error(sum(loss * n for loss, n, _ in steps) / number, (total / number).detach()) < 1e-12
    for i, reference in enumerate(grads):
        assert relative_error(sum(g[i] * n for _, n, g in steps) / number, reference) < 1e-12


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_document_does_not_see_the_one_before(layout):
    """Another first document changes none of the second's outputs, to the last bit."""
    torch.manual_seed(0)
    model, batch = TinyLM(14).double(), draw(1, 14)

    def outputs(ids):
        def work(topology):
            shard = shard_batch({"input_ids": ids, "position_ids": counting(5, 9)}, topology, layout)
            attention = usp.USPAttention(topology=topology, layout=layout)

            def attend(q, k, v):
                return attention(q, k, v, is_causal=True, seq_len=14, cu_seqlens=shard["cu_seqlens"])

            with torch.no_grad():
                logits = model(shard["input_ids"], shard["position_ids"], attend)
            return usp.unshard(logits, topology, layout=layout, length=14)

        return local.run(work, ulysses_degree=2, ring_degree=2)[0]

    ids = batch["input_ids"]
    other = torch.cat(((ids[:, :5] + 1) % 50, ids[:, 5:]), 1)
    before, after = outputs(ids), outputs(other)
    assert torch.equal(before[:, 5:], after[:, 5:])
    assert not torch.equal(before[:, :5], after[:, :5])
