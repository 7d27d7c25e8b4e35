"""Progressive context extension: training stages of growing length and RoPE theta, each with degrees of its own."""

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from usp import layouts
from usp.errors import InputError
from usp.mask import Mask
from usp.planner import models
from usp.planner.plan import Plan, plan
from usp.planner.spec import ClusterSpec, Count, ModelSpec, Size, Spec, Workload
from usp.schedule import Schedule


def parse_number(value: Any) -> Any:
    """A number from text: YAML reads 5e7 as text. What is not a number is returned as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


Degree = Annotated[int, Field(ge=1, le=2**16)]
Theta = Annotated[float, Field(gt=1, le=1e15, allow_inf_nan=False), BeforeValidator(parse_number)]


class ContextStage(Spec):
    """A part of the training in which nothing changes.

    Attributes:
        seq_len: global number of tokens of a sequence; "128K" and "1M" are understood.
        steps: optimizer steps.
        rope_theta: base of RoPE's frequencies.
        batch: sequences of an optimizer step, over all ranks and micro-batches.
        ulysses_degree: ranks of a Ulysses group; None, with `ring_degree`: as planned.
        ring_degree: ranks of a ring.
        layout: how positions are dealt to ring ranks; None: as planned.
    """

    seq_len: Size
    steps: Count
    rope_theta: Theta = 10_000.0
    batch: Count = 1
    ulysses_degree: Degree | None = None
    ring_degree: Degree | None = None
    layout: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.ulysses_degree is None) != (self.ring_degree is None):
            raise ValueError("ulysses_degree and ring_degree go together: give both or neither")
        if self.layout is not None:
            layouts.parse(self.layout)
        return self

    @property
    def tokens(self) -> int:
        """Tokens of the whole stage."""
        return self.steps * self.batch * self.seq_len

    @property
    def sequence_degree(self) -> int | None:
        """Number of ranks that share a sequence, where the stage says so."""
        return self.ulysses_degree and self.ring_degree and self.ulysses_degree * self.ring_degree

    def tokens_per_rank(self, ulysses_degree: int | None = None, ring_degree: int | None = None) -> int:
        """Tokens of one sequence on the rank that holds the most: the length of the longest shard.

        Args:
            ulysses_degree: of the topology; None: the stage's own.
            ring_degree: likewise.

        Raises:
            InputError: a degree is neither given nor the stage's, or is below 1.
        """
        ulysses = self.ulysses_degree if ulysses_degree is None else ulysses_degree
        ring = self.ring_degree if ring_degree is None else ring_degree
        if ulysses is None or ring is None or min(ulysses, ring) < 1:
            raise InputError(
                f"degrees of 1 or more are needed for the stage of {self.seq_len} tokens, got ulysses_degree={ulysses} "
                f"and ring_degree={ring}: give them here or in the stage"
            )
        longest = max(Schedule(Mask.full(), self.layout or "contiguous", self.seq_len, ring).lengths)
        return -(-longest // ulysses)

    def inverse_frequencies(self, head_dim: int) -> tuple[float, ...]:
        """RoPE's angle per position of each pair of a head's dimensions: theta^(-2i / head_dim), head_dim / 2 of them.

        Raises:
            InputError: `head_dim` is not even and positive.
        """
        if head_dim < 2 or head_dim % 2:
            raise InputError(f"RoPE turns pairs of dimensions: head_dim must be even and positive, got {head_dim}")
        return tuple(self.rope_theta ** (-i / head_dim) for i in range(0, head_dim, 2))


class ContextSchedule(Spec):
    """Stages of growing context (progressive context extension, Liu et al. 2024, arXiv 2402.08268).

    Where a run stands follows from its global step alone, so a checkpoint needs nothing else to resume.

    Attributes:
        name: what to call it.
        stages: in the order they are trained; lengths ascend and theta does not fall.
    """

    name: str = "custom"
    stages: Annotated[tuple[ContextStage, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        for number, (before, after) in enumerate(pairwise(self.stages), start=1):
            if after.seq_len <= before.seq_len:
                raise ValueError(f"stages.{number}.seq_len: lengths ascend, got {after.seq_len} after {before.seq_len}")
            if after.rope_theta < before.rope_theta:
                raise ValueError(
                    f"stages.{number}.rope_theta: theta does not fall, got {after.rope_theta:g} after "
                    f"{before.rope_theta:g}"
                )
        return self

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Tokens of all stages."""
        return sum(stage.tokens for stage in self.stages)

    def stage_at(self, global_step: int) -> tuple[ContextStage, int]:
        """The stage that a global step, counted from 0, belongs to, and the step within it.

        Raises:
            InputError: the schedule has no such step.
        """
        if global_step == self.steps:
            raise InputError(f"global step {global_step} is beyond the last: the {self.steps} steps are done")
        stage, left = next(self.remaining(global_step))
        return stage, stage.steps - len(left)

    def remaining(self, global_step: int = 0) -> Iterator[tuple[ContextStage, range]]:
        """What is left to train from a global step on: each stage with the global steps that it still has.

        Args:
            global_step: number of optimizer steps that are done.

        Raises:
            InputError: the schedule has no such step.
        """
        if not 0 <= global_step <= self.steps:
            raise InputError(f"global step {global_step} is outside the schedule of {self.steps} steps")
        for stage, end in zip(self.stages, accumulate(stage.steps for stage in self.stages), strict=True):
            if global_step < end:
                yield stage, range(max(global_step, end - stage.steps), end)

    def plans(
        self, model: ModelSpec | str, cluster: ClusterSpec, workload: Mapping[str, Any] | None = None
    ) -> tuple[Plan, ...]:
        """The plan of every stage, on all devices of a cluster.

        A stage without degrees gets the number of data-parallel groups that makes its step shortest: they divide both
        the devices and its batch, and each runs its share of the batch one after the other. A stage with degrees, or
        with a layout, gets the choices that have them, and as many groups as the degrees leave.

        Args:
            model: the shape of the model, or the name of a preset, or the path of a `config.json`.
            cluster: the cluster.
            workload: further fields of `Workload`, for all stages, such as `tensor_parallel` and `checkpointing`.

        Raises:
            InputError: a stage's degrees do not divide the devices, are not legal for the model, or leave groups among
                which its batch does not divide; or a field is wrong, or follows from the stage.
        """
        model = models.find(model) if isinstance(model, str) else model
        fields = {"is_causal": model.vocab > 0, **(workload or {})}
        if given := {"seq_len", "data_parallel"} & set(fields):
            raise InputError(f"{', '.join(sorted(given))} follow from the stages: leave them out of workload")
        return tuple(_plan(stage, model, cluster, fields) for stage in self.stages)


def _plan(stage: ContextStage, model: ModelSpec, cluster: ClusterSpec, fields: Mapping[str, Any]) -> Plan:
    workload = Workload.read({**fields, "seq_len": stage.seq_len})
    plans = [
        _narrow(stage, plan(model, cluster, workload.model_copy(update={"data_parallel": groups})))
        for groups in _groups(stage, cluster.gpus // workload.tensor_parallel, workload.batch)
    ]

    def cost(candidate: Plan) -> tuple[bool, float]:
        groups, best = candidate.workload.data_parallel, candidate.best
        return best is None, groups if best is None else best.seconds / groups

    return min(plans, key=cost)


def _groups(stage: ContextStage, ranks: int, at_a_time: int) -> list[int]:
    """Numbers of data-parallel groups of these ranks that a stage can have."""
    size = stage.sequence_degree
    fitting = [n for n in range(1, ranks + 1) if ranks % n == 0 and size in (None, ranks // n)]
    sharing = [n for n in fitting if stage.batch % (n * at_a_time) == 0]
    if not sharing:
        degrees = f"{stage.ulysses_degree} x {stage.ring_degree} = {size} ranks" if size else "any number of ranks"
        raise InputError(
            f"the stage of {stage.seq_len} tokens has {stage.batch} sequences a step, {at_a_time} at a time in a "
            f"group; {ranks} ranks in groups of {degrees} cannot share them: "
            + (f"{' or '.join(map(str, fitting))} groups do not divide them" if fitting else f"{ranks} is no multiple")
        )
    return sharing


def _narrow(stage: ContextStage, whole: Plan) -> Plan:
    """The plan with the choices that a stage allows. On a ring of one there is no layout to choose."""
    choices = tuple(
        choice
        for choice in whole.choices
        if stage.sequence_degree is None
        or (choice.ulysses_degree, choice.ring_degree) == (stage.ulysses_degree, stage.ring_degree)
        if stage.layout in (None, choice.layout) or choice.ring_degree == 1
    )
    if not choices:
        why = next(pair.why for pair in whole.rejected if pair.ulysses_degree == stage.ulysses_degree)
        raise InputError(f"the stage of {stage.seq_len} tokens: {why}")
    return whole.model_copy(update={"choices": choices})


PRESETS: Mapping[str, ContextSchedule] = {
    "lwm-text": ContextSchedule(
        name="lwm-text",
        stages=tuple(
            ContextStage(seq_len=seq_len, steps=steps, rope_theta=theta, batch=2**22 // seq_len)
            for seq_len, steps, theta in (
                (2**15, 1200, 1e6), (2**17, 3000, 1e7), (2**18, 3000, 1e7), (2**19, 720, 2.5e7), (2**20, 450, 5e7),
            )
        ),
    ),
}  # fmt: skip
"""Published schedules by name.

"lwm-text": the Large World Model's text stages (Liu et al. 2024, arXiv 2402.08268, table 11), which start from LLaMA-2
7B, of 4K and theta 10^4. Its "4M tokens per batch" are taken as 2^22. The learning rate is a constant 4e-5, after 100,
200, 200, 50 and 25 steps of warm-up.
"""
