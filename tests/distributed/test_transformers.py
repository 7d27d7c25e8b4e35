"""Models of Hugging Face transformers, sharded over 2 x 2 ranks, against one process without usp.

The reference runs every document by itself through torch's own attention, in float64.
"""

import warnings
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters

import usp
from tests.dense import relative_error
from usp.batch import shard_batch
from usp.loss import count_targets

BOUND = 1e-10
VOCAB, SEQ_LEN = 64, 37  # shards of 9 or 10 tokens
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, attention_dropout=0.0,
)  # fmt: skip
MIXED = dict(layer_types=["sliding_attention", "full_attention"])
FAMILIES = {
    "llama": SHAPE,
    "mistral, window in a shard": SHAPE | dict(model_type="mistral", sliding_window=4),
    "mistral, window across shards": SHAPE | dict(model_type="mistral", sliding_window=14),
    "qwen2": SHAPE | dict(use_sliding_window=True, sliding_window=15, max_window_layers=1),
    "qwen3": SHAPE | MIXED | dict(head_dim=8, use_sliding_window=True, sliding_window=12),
    "gemma3": SHAPE | MIXED | dict(model_type="gemma3_text", head_dim=8, query_pre_attn_scalar=20, sliding_window=6),
    "gemma2": SHAPE | MIXED | dict(
        head_dim=8, query_pre_attn_scalar=20, sliding_window=6, attn_logit_softcapping=1.0, final_logit_softcapping=None
    ),
    "gpt_oss": SHAPE | MIXED | dict(
        head_dim=8, sliding_window=6, num_local_experts=4, num_experts_per_tok=2, rope_parameters=dict(
            rope_type="default", rope_theta=10_000.0
        ), experts_implementation="batched_mm",
    ),
    "deepseek_v3": SHAPE | dict(
        num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, experts_implementation="batched_mm",
    ),
    "qwen2_5_vl": SHAPE | dict(
        model_type="qwen2_5_vl_text", hidden_size=VOCAB, num_attention_heads=8, use_sliding_window=True,
        sliding_window=5, max_window_layers=1, rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 2]),
    ),
}  # fmt: skip
"""The last has no head: its hidden states, of width VOCAB, pass for logits."""
UNUSUAL = ("gemma2", "gpt_oss")
"""Families whose scores torch's own attention cannot make."""
LANGUAGE = [family for family in FAMILIES if family != "qwen2_5_vl"]


def build(family, **changes):
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
    )

    wanted = FAMILIES[family] | changes
    config = AutoConfig.for_model(wanted.pop("model_type", family), **wanted)
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if family in LANGUAGE else AutoModel
    AttentionInterface.register("definition", definition)
    AttentionMaskInterface.register("definition", AttentionMaskInterface()["eager"])
    own = "definition" if family in UNUSUAL else "sdpa"
    model = auto.from_config(config, attn_implementation=own).double().train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("sinks"):
                p.normal_()  # made 0 or not at all, which would hide a wrong head
    for module in model.modules():
        if type(module).__name__ in IN_FLOAT32:
            module.forward = partial(IN_FLOAT32[type(module).__name__], module)
    return model


def definition(module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **_):
    """Softcap and sinks as transformers' eager functions have them, which take a softmax in float32."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores if attention_mask is None else scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


def gemma_norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def deepseek_router(self, x):
    logits = F.linear(x.view(-1, self.hidden_dim), self.weight)
    weights, indices = logits.sigmoid().topk(self.top_k, sorted=False)
    return logits, weights / weights.sum(-1, keepdim=True) * self.routed_scaling_factor, indices


IN_FLOAT32 = {"Gemma2RMSNorm": gemma_norm, "Gemma3RMSNorm": gemma_norm, "DeepseekV3TopkRouter": deepseek_router}
"""Modules that compute in float32 whatever their dtype, and so sum gradients over tokens to 1e-7 only."""


@dataclass(frozen=True)
class Batch:
    """What a data loader gives, and the documents a model may see: (start, stop) each."""

    given: dict
    documents: list


def make(kind, rows=2, seq_len=SEQ_LEN):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (rows, seq_len), generator=generator)
    labels = ids.clone()
    labels[:, 5:9] = -100
    given = dict(input_ids=ids, labels=labels)
    if kind == "packed":
        ends = [0, 3, 11, 30, seq_len]
        return Batch(given | dict(cu_seqlens=ends), list(pairwise(ends)))
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[:, :2] = mask[:, -6:] = 0
        return Batch(given | dict(attention_mask=mask), [(2, seq_len - 6)])
    if "axes" in kind:
        ends = [0, 12, seq_len] if "packed" in kind else [0, seq_len]
        positions = torch.cat([axes(stop - start) for start, stop in pairwise(ends)], -1).unsqueeze(1)
        positions = positions.repeat(1, rows, 1)  # (4, B, S), or without each token's place among all, (3, B, S)
        return Batch(given | dict(position_ids=positions if "packed" in kind else positions[1:]), list(pairwise(ends)))
    return Batch(given, [(0, seq_len)])


def axes(length):
    """Place, time, height and width of an image of 2 rows of 3 patches between texts, as Qwen2-VL counts them."""
    image = torch.tensor([[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]) + 2
    before, after = torch.arange(2).expand(3, -1), torch.arange(5, length - 3).expand(3, -1)
    return torch.cat([torch.arange(length).unsqueeze(0), torch.cat([before, image, after], 1)])


def targets(batch):
    """Shifted inside each document; padding has none."""
    labels = batch.given["labels"]
    shifted = torch.full_like(labels, -100)
    for start, stop in batch.documents:
        shifted[:, start : stop - 1] = labels[:, start + 1 : stop]
    return shifted


def summed_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def reference(model, batch):
    """logits (B, S, V), 0 where there is padding; loss; gradients by name."""
    ids, shifted = batch.given["input_ids"], targets(batch)
    total = (shifted != -100).sum()
    logits = torch.zeros(*ids.shape, VOCAB, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    positions = batch.given.get("position_ids")
    for start, stop in batch.documents:
        here = None if positions is None else positions[..., start:stop]
        out = model(input_ids=ids[:, start:stop], position_ids=here, use_cache=False)[0]
        logits[:, start:stop] = out.detach()
        loss = loss + summed_loss(out, shifted[:, start:stop]) / total
    return logits, loss, gradients(model, loss)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sharded(model, call, batch, topology, layout):
    """The same of an enabled model, gathered and summed over the ranks."""
    shard = shard_batch(batch.given, topology, layout)
    shifted = shard.pop("shift_labels")
    del shard["labels"]
    total = (targets(batch) != -100).sum()
    out = call(**shard)[0]
    loss = summed_loss(out, shifted) / total
    grads = gradients(model, loss)
    loss = loss.detach()
    for tensor in (loss, *grads.values()):
        dist.all_reduce(tensor)
    logits = usp.unshard(out.detach(), topology, layout=layout, length=SEQ_LEN)
    for start, stop in zip(
        [0, *(stop for _, stop in batch.documents)], [*(s for s, _ in batch.documents), SEQ_LEN], strict=True
    ):
        logits[:, start:stop] = 0
    return logits, loss, grads


def worst(found, expected):
    logits, loss, grads = found
    assert grads.keys() == expected[2].keys()
    errors = {"logits": relative_error(logits, expected[0]), "loss": relative_error(loss, expected[1].detach())}
    return errors | {name: relative_error(grad, expected[2][name]) for name, grad in grads.items()}


def enable(model, topology, **options):
    warnings.filterwarnings("ignore", "causal attention over a ring")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of importing transformers
        from usp.integrations.transformers import enable

    return enable(model, topology, **options)


def checkpointed(model, use_reentrant):
    model.activation_checkpointing_enable(dict(use_reentrant=use_reentrant))
    return model


def compiled(model, backend="aot_eager"):
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(model, backend=backend, fullgraph=True)


MODES = {
    "eager": lambda model: model,
    "reentrant": partial(checkpointed, use_reentrant=True),
    "not reentrant": partial(checkpointed, use_reentrant=False),
    "compiled": compiled,
    "traced": partial(compiled, backend="eager"),
}
CASES = [("whole", "contiguous"), ("packed", "zigzag"), ("padded", "zigzag")]


def compare(rank, family, cases, modes):
    """{(kind, layout, mode): {what: error}} of everything above the bound; a compiled model is one graph."""
    topology = usp.Topology.build(2, 2)
    plain = build(family)
    wrong = {}
    for kind, layout in cases:
        batch = make(kind)
        expected = reference(plain, batch)
        for mode in modes:
            model = build(family)
            with enable(model, topology, layout=layout):
                errors = worst(sharded(model, MODES[mode](model), batch, topology, layout), expected)
            above = {name: error for name, error in errors.items() if not error <= BOUND}
            if mode in ("compiled", "traced") and counters["stats"]["unique_graphs"] != 1:
                above["graphs"] = counters["stats"]["unique_graphs"]
            if above:
                wrong[kind, layout, mode] = above
    return wrong


@pytest.mark.parametrize("family", LANGUAGE)
def test_equals_one_process(pool, family):
    assert pool(4).run(compare, family, CASES, ["eager"], timeout=120) == [{}] * 4


@pytest.mark.parametrize("family", LANGUAGE)
def test_activation_checkpointing(pool, family):
    for mode, case in (("reentrant", ("padded", "contiguous")), ("not reentrant", ("packed", "zigzag"))):
        assert pool(4).run(compare, family, [case], [mode], timeout=120) == [{}] * 4


@pytest.mark.parametrize(
    ("family", "kind", "layout", "mode"),
    [
        ("llama", "padded", "contiguous", "traced"),
        ("mistral, window in a shard", "packed", "zigzag", "traced"),
        ("mistral, window across shards", "padded", "zigzag", "compiled"),
        ("qwen2", "padded", "contiguous", "traced"),
        ("qwen3", "packed", "contiguous", "compiled"),
        ("gemma2", "packed", "zigzag", "compiled"),
        ("gemma3", "padded", "zigzag", "traced"),
        ("gpt_oss", "padded", "contiguous", "compiled"),
        ("deepseek_v3", "packed", "zigzag", "compiled"),
    ],
)
def test_the_whole_model_compiles(pool, family, kind, layout, mode):
    """Into one graph. "traced" runs it as it is, "compiled" derives the graph of the backward pass from it too."""
    assert pool(4).run(compare, family, [(kind, layout)], [mode], timeout=200) == [{}] * 4


@pytest.mark.parametrize(("kind", "layout", "mode"), [
    ("axes", "contiguous", "eager"),
    ("axes", "zigzag", "traced"),
    ("packed axes", "zigzag", "eager"),
    ("packed axes", "contiguous", "not reentrant"),
])  # fmt: skip
def test_positions_of_several_axes(pool, kind, layout, mode):
    """(3, B, S), and (4, B, S) whose documents are read off where all axes restart."""
    assert pool(4).run(compare, "qwen2_5_vl", [(kind, layout)], [mode], timeout=120) == [{}] * 4


def two_models(rank):
    """Forward a, forward b, backward a, backward b: recomputation sees each model's own grid, layout and documents."""
    a, b = (checkpointed(build("llama"), use_reentrant=False) for _ in range(2))
    parts = []
    for model, degrees, layout, kind in ((a, (4, 1), "contiguous", "packed"), (b, (1, 4), "striped", "whole")):
        topology, batch = usp.Topology.build(*degrees), make(kind)
        enable(model, topology, layout=layout)
        shard = shard_batch(batch.given, topology, layout)
        shifted = shard.pop("shift_labels")
        del shard["labels"]
        parts.append((model, batch, summed_loss(model(**shard).logits, shifted) / (targets(batch) != -100).sum()))
    errors = []
    for model, batch, loss in parts:
        found, expected = gradients(model, loss), reference(build("llama"), batch)[2]
        for name, grad in found.items():
            dist.all_reduce(grad)
            errors.append(relative_error(grad, expected[name]))
    return max(errors)


def test_two_models_with_grids_and_layouts_of_their_own(pool):
    assert max(pool(4).run(two_models)) <= BOUND


def own_loss(rank, degrees, mode):
    """Relative errors of the loss that the model itself returns, averaged, and of its averaged gradients.

    The loss is transformers', in float32. Three ranks of four have valid targets, very unevenly many.
    """
    topology = usp.Topology.build(*degrees)
    batch = make("whole")
    labels = batch.given["labels"]
    labels[0, 12:-1] = -100
    labels[1, 3:] = -100
    plain, model = build("llama"), build("llama")
    loss = plain(input_ids=batch.given["input_ids"], labels=labels, use_cache=False).loss
    expected = gradients(plain, loss)
    enable(model, topology)
    mine = slice(topology.data_rank, topology.data_rank + 1) if topology.data_degree > 1 else slice(None)
    shard = shard_batch({name: x[mine] for name, x in batch.given.items()}, topology)
    if topology.data_degree > 1:
        shard["num_items_in_batch"] = count_targets(shard["shift_labels"]) / dist.get_world_size()
    found = MODES[mode](model)(**shard).loss
    grads = gradients(model, found)
    found = found.detach()
    for tensor in (found, *grads.values()):
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    errors = [relative_error(grad, expected[name]) for name, grad in grads.items()]
    return max(errors), relative_error(found, loss.detach())


@pytest.mark.parametrize(
    ("degrees", "mode"), [((2, 2), "eager"), ((2, 2), "compiled"), ((2, 1), "eager"), ((1, 2), "not reentrant")]
)
def test_the_models_own_loss_averages_to_that_of_one_process(pool, degrees, mode):
    for error in pool(4).run(own_loss, degrees, mode, timeout=120):
        assert max(error) < 1e-6


def local_positions(rank):
    topology = usp.Topology.build(2, 2)
    model = build("llama")
    enable(model, topology)
    try:
        model(input_ids=torch.ones(3, 6, dtype=torch.int64), position_ids=torch.arange(6).expand(3, -1))
    except usp.USPError as error:
        return type(error).__name__, str(error)


def test_local_positions_are_an_error_on_every_rank(pool):
    first, *others = pool(4).run(local_positions)
    assert first[0] == "AgreementError"
    assert first[1].startswith("rank 1: position_ids on rank 1 start with [0, 1, 2, 3]")
    assert [name for name, _ in others] == ["InputError"] * 3


def rows_of_their_own(rank):
    """Relative errors of logits and gradients: one row is padded on the left, the other packed and padded."""
    topology, whole = usp.Topology.build(2, 2), make("whole")
    ids, mask = whole.given["input_ids"], torch.ones(2, SEQ_LEN, dtype=torch.int64)
    mask[0, :9] = mask[1, -3:] = 0
    given = whole.given | dict(attention_mask=mask, cu_seqlens=[(0, SEQ_LEN), (0, 5, SEQ_LEN)])
    documents = [(0, 9, SEQ_LEN), (1, 0, 5), (1, 5, SEQ_LEN - 3)]
    plain, model = build("qwen2"), build("qwen2")
    shifted, losses = torch.full_like(ids, -100), []
    for row, start, stop in documents:
        shifted[row, start : stop - 1] = given["labels"][row, start + 1 : stop]
        logits = plain(input_ids=ids[row : row + 1, start:stop], use_cache=False).logits
        losses.append(summed_loss(logits, shifted[row : row + 1, start:stop].clone()))
    total = (shifted != -100).sum()
    expected = gradients(plain, sum(losses) / total)
    enable(model, topology, layout="zigzag")
    shard = shard_batch(given, topology, "zigzag")
    targets_here = shard.pop("shift_labels")
    del shard["labels"]
    loss = summed_loss(model(**shard).logits, targets_here) / total
    found = gradients(model, loss)
    for grad in found.values():
        dist.all_reduce(grad)
    return max(relative_error(grad, expected[name]) for name, grad in found.items())


def test_rows_with_documents_and_padding_of_their_own(pool):
    assert max(pool(4).run(rows_of_their_own)) <= BOUND


def transformers_own_boundaries(rank):
    """`cu_seq_lens_q` and `cu_seq_lens_k`, as transformers' collator for packed batches makes them."""
    topology, batch = usp.Topology.build(2, 2), make("packed", rows=1)
    model = build("llama")
    enable(model, topology, layout="zigzag")
    shard = shard_batch(batch.given, topology, "zigzag")
    ends = torch.tensor(shard.pop("cu_seqlens"), dtype=torch.int32)
    how = {name: shard[name] for name in ("input_ids", "position_ids", "seq_len")}
    logits = model(**how, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=19, max_length_k=19).logits
    whole = usp.unshard(logits.detach(), topology, layout="zigzag", length=SEQ_LEN)
    return relative_error(whole, reference(build("llama"), batch)[0])


def test_boundaries_in_the_words_of_transformers(pool):
    assert max(pool(4).run(transformers_own_boundaries)) <= BOUND
