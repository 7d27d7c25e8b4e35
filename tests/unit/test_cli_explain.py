"""`usp explain`: its numbers and pictures against a brute-force dense mask, its document, its words and exit codes."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.schema import fits
from tests.unit.strategies import examples, flat, layout_texts, unions, visible
from usp import layouts
from usp.cli import tile_plot
from usp.cli.app import app
from usp.cli.explain import BUDGET, Explanation, LayoutTime, best, compare, dealt, explanation, summary
from usp.cli.mask_options import MaskOptions, describe_mask
from usp.mask import Band, Mask
from usp.planner.spec import Workload
from usp.planner.survey import survey
from usp.schedule import Schedule
from usp.tiles import Tile

MASKS = {
    "full": lambda total: Mask.full(),
    "causal": lambda total: Mask.causal(),
    "window": lambda total: Mask.causal() & Mask.window(5, 0),
    "two-sided": lambda total: Mask.window(3, 2),
    "documents": lambda total: Mask.causal() & Mask.documents([3, total - 9, 6]),
    "prefix": lambda total: Mask.prefix_lm(4) & Mask.documents([7, total - 7]),
    "sinks": lambda total: Mask.streaming(2, 3),
    "nothing": lambda total: Mask.offsets(),
}
every_case = pytest.mark.parametrize(
    ("layout", "mask", "ring_degree"),
    [(layout, mask, ring) for layout in layouts.names() for mask in MASKS for ring in range(1, 6)],
)


def make(layout: str, mask: str, seq_len: int, ring_degree: int) -> Schedule:
    """A schedule whose layout, if it deals by a mask, deals by its own."""
    return Schedule(MASKS[mask](seq_len), layouts.layout_for(layout, MASKS[mask](seq_len)), seq_len, ring_degree)


def seen(schedule: Schedule) -> np.ndarray:
    """(S, S) of 0 and 1: which pairs are visible."""
    tokens = list(range(schedule.seq_len))
    return visible(schedule.mask, tokens, tokens)


def hop_of(schedule: Schedule) -> np.ndarray:
    """(S, S): the hop of every pair, visible or not, from who holds what."""
    ranks = np.zeros(schedule.seq_len, dtype=int)
    for rank in range(schedule.ring_degree):
        ranks[flat(schedule.positions(rank))] = rank
    return (ranks[:, None] - ranks[None, :]) % schedule.ring_degree


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["explain", *args])


def usp(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "usp.cli", *args], capture_output=True, text=True, timeout=60)


# ---- work and balance ------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("seq_len", [11, 24])
def test_work_of_each_rank_and_hop_is_the_number_of_visible_pairs(layout, mask, ring_degree, seq_len):
    schedule = make(layout, mask, seq_len, ring_degree)
    pairs, hops, found = seen(schedule), hop_of(schedule), survey(schedule, BUDGET)
    held = [flat(schedule.positions(rank)) for rank in range(ring_degree)]
    work = [[(pairs * (hops == hop))[rows].sum() for rows in held] for hop in range(ring_degree)]
    work, beyond = work[: schedule.hops + 1], work[schedule.hops + 1 :]
    assert found.complete and not any(map(any, beyond))
    assert [list(row) for row in found.work] == work
    assert found.totals == [pairs[rows].sum() for rows in held]
    most = sum(max(row) for row in work)
    assert found.slowest == most
    assert found.waiting == pytest.approx(1 - pairs.sum() / ring_degree / most if most else 0)
    for hop, row in zip(summary(found), work, strict=True):
        assert (hop.max, hop.mean, hop.stands_for) == (max(row), pytest.approx(sum(row) / ring_degree), 1)


def test_the_balance_by_hand():
    """Two ranks of two tokens, causal: 3 and 3 pairs at hop 0, then rank 1 computes 4 while rank 0 waits."""
    found = survey(Schedule(Mask.causal(), "contiguous", 4, 2), BUDGET)
    assert found.work == ((3, 3), (0, 4)) and [hop.tiles for hop in summary(found)] == [1, 1]
    assert found.slowest == 3 + 4
    assert found.waiting == pytest.approx(1 - (3 + 2) / 7)
    assert [hop.max_over_mean for hop in summary(found)] == [1, 2]


def test_zigzag_takes_four_sevenths_of_the_time_of_contiguous():
    """Of R = 4 blocks of work, contiguous waits 1/2 + 1 + 1 + 1 of a block, zigzag 4 x 1/2, as S grows."""
    schedule = Schedule(Mask.causal(), "contiguous", 2**20, 4)
    compared = {other.layout: other for other in compare(schedule, survey(schedule, BUDGET))}
    assert set(compared) == set(layouts.names())
    assert compared["contiguous"].relative_time == 1
    assert compared["zigzag"].relative_time == pytest.approx(4 / 7, rel=1e-5)
    assert explanation(schedule, survey(schedule, BUDGET)).better_layout == "zigzag"


@pytest.mark.parametrize(("layout", "mask"), [("zigzag", Mask.causal()), ("contiguous", Mask.full())])
def test_an_even_layout_needs_no_other(layout, mask):
    schedule = Schedule(mask, layout, 4096, 4)
    told = explanation(schedule, survey(schedule, BUDGET))
    assert told.better_layout is None
    assert told.balance == pytest.approx(1) and told.waiting == pytest.approx(0, abs=1e-3)


def test_layouts_are_compared_by_their_names():
    """One that deals by a mask deals by that of the schedule, and is not looked at twice."""
    mask = Mask.causal() & Mask.documents([6, 1, 1, 1, 1, 1, 1])
    schedule = Schedule(mask, layouts.layout_for("balanced", mask), 12, 2)
    told = explanation(schedule, survey(schedule, BUDGET))
    assert (told.layout, [other.layout for other in told.layouts]) == ("balanced", layouts.names())
    assert told.schedule == ":0@0,6,7,8,9,10,11,12 balanced[:0@0,6,7,8,9,10,11,12] S=12 R=2"
    times = {other.layout: other for other in told.layouts}
    assert times["balanced"].relative_time == 1 and dealt(mask)["balanced"] == schedule.layout
    contiguous = Schedule(mask, "contiguous", 12, 2)
    other = next(o for o in compare(contiguous, survey(contiguous, BUDGET)) if o.layout == "balanced")
    assert other.relative_time == pytest.approx(1 / times["contiguous"].relative_time)
    assert other.tiles == sum(hop.tiles for hop in summary(survey(schedule, BUDGET)))


def layout_time(layout: str, relative_time: float, tiles: int) -> LayoutTime:
    return LayoutTime(layout=layout, relative_time=relative_time, tiles=tiles, hops_moved=1, sampled=False)


def test_the_best_layout_is_the_fastest_and_then_the_one_of_fewest_calls():
    slow, many, few = layout_time("a", 1, 1), layout_time("b", 0.5, 9), layout_time("c", 0.5, 4)
    assert best([slow, many, few]) == few
    assert best([slow, many]) == many
    assert best([slow, layout_time("d", 0.97, 1)]) is None


def test_nothing_to_see_waits_for_nobody():
    told = explanation(s := Schedule(Mask.offsets(), "zigzag", 8, 2), survey(s, BUDGET))
    assert (told.balance, told.waiting, told.better_layout, told.hops_moved) == (None, 0, None, 0)


# ---- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", layouts.names())
def test_a_large_ring_is_sampled_and_says_so(layout):
    schedule = Schedule(Mask.causal(), layouts.layout_for(layout, Mask.causal()), 2**20, 1024)
    found = survey(schedule, BUDGET)
    assert not found.complete
    assert len(found.ranks) * len(found.hops) <= BUDGET
    assert (found.ranks[0], found.ranks[-1]) == (0, 1023)
    assert sum(stands_for for _, stands_for in found.hops) == 1024
    for (hop, _), work in zip(found.hops, found.work, strict=True):
        assert work[-1] == sum(tile.area for tile in schedule.tiles(1023, 1023 - hop))


def test_a_sample_of_hops_stands_for_all_of_them():
    """Every hop of full attention is alike, so an estimate from any of them is exact."""
    schedule = Schedule(Mask.full(), "striped", 96, 12)
    found = survey(schedule, budget=12 * 5)
    assert (len(found.ranks), len(found.hops)) == (7, 8)
    assert found.hops[0] == (0, 1)
    assert found.totals == [8 * 96] * 7 and found.slowest == survey(schedule, BUDGET).slowest
    assert survey(schedule, budget=1).totals == [8 * 96] * 2


def test_a_sampled_document_has_no_work_for_the_others():
    schedule = Schedule(Mask.causal(), "contiguous", 192, 24)
    told = explanation(schedule, found := survey(schedule, budget=16 * 24))
    assert told.sampled is not None and (told.sampled.ranks, told.sampled.hops) == (16, 24)
    assert {rank.rank for rank in told.ranks if rank.work is not None} == set(found.ranks)
    assert all(rank.work == schedule.work(rank.rank) for rank in told.ranks if rank.work is not None)


def test_a_large_ring_prints_little():
    done = invoke("--seq-len", "64K", "-r", "256", "--layout", "striped")
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) < 80
    assert max(map(len, done.stdout.splitlines())) < 130
    for text in ("... 244 more ranks", "... 244 more hops", "Sampled: the numbers are estimates, from 64 of 256 ranks"):
        assert text in done.stdout


# ---- pictures --------------------------------------------------------------------------------------------------------


@every_case
def test_a_cell_of_one_token_shows_its_hop(layout, mask, ring_degree):
    schedule = make(layout, mask, 20, ring_degree)
    line = tile_plot.cells(schedule, 20)
    wanted = np.where(seen(schedule), hop_of(schedule), -1)
    shown = [[-1 if hop is None else hop for hop in row] for row in tile_plot.raster(schedule, line, line)]
    np.testing.assert_array_equal(shown, wanted)


@examples(80)
@given(data=st.data(), ring_degree=st.integers(1, 6), rows=st.integers(1, 40))
def test_a_cell_shows_a_hop_that_computes_some_of_it(data, ring_degree, rows):
    seq_len = data.draw(st.integers(1, 40))
    schedule = Schedule(data.draw(unions(seq_len)), data.draw(layout_texts(seq_len)), seq_len, ring_degree)
    queries, keys = tile_plot.cells(schedule, rows), tile_plot.cells(schedule, 2 * rows)
    assert {position for cell in queries for position in cell.span} == set(range(seq_len))
    pairs, hops = seen(schedule), hop_of(schedule)
    for q, row in zip(queries, tile_plot.raster(schedule, queries, keys), strict=True):
        for k, hop in zip(keys, row, strict=True):
            cut = np.ix_(q.span, k.span)
            computed = set(hops[cut][pairs[cut] == 1].tolist())
            assert hop in computed if computed else hop is None
            if (q.rank - k.rank) % ring_degree in computed and hop != (q.rank - k.rank) % ring_degree:
                assert not pairs[np.ix_(flat(q.held), flat(k.held))].any()


def test_ranks_take_turns_where_they_share_a_stretch():
    line = tile_plot.cells(Schedule(Mask.full(), "striped", 4096, 4), 8)
    assert [cell.rank for cell in line] == [0, 1, 2, 3, 0, 1, 2, 3] and all(cell.shared for cell in line)
    line = tile_plot.cells(Schedule(Mask.full(), "zigzag", 4096, 4), 8)
    assert [cell.rank for cell in line] == [0, 1, 2, 3, 3, 2, 1, 0] and not any(cell.shared for cell in line)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ring_degree", [1, 2, 4])
def test_pieces_are_the_visible_pairs_in_global_positions(layout, mask, ring_degree):
    schedule = make(layout, mask, 21, ring_degree)
    covered = np.zeros((21, 21), dtype=int)
    for rank in range(ring_degree):
        for other in range(ring_degree):
            for piece in tile_plot.pieces(schedule, rank, other):
                rows, columns = np.arange(piece.q.start, piece.q.stop), np.arange(piece.k.start, piece.k.stop)
                offset = (columns - piece.k.start)[None, :] - (rows - piece.q.start)[:, None]
                lo = -np.inf if piece.band.lo is None else piece.band.lo
                hi = np.inf if piece.band.hi is None else piece.band.hi
                covered[np.ix_(rows, columns)] += (offset >= lo) & (offset <= hi)
                assert set(rows) <= set(flat(schedule.positions(rank)))
                assert set(columns) <= set(flat(schedule.positions(other)))
    np.testing.assert_array_equal(covered, seen(schedule))


@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(-300, 0), Band(-100, 200), Band(50, None)])
def test_an_outline_encloses_the_visible_part(band):
    tile = Tile(slice(1000, 1400), slice(200, 700), band)
    corners = tile_plot.outline(tile)
    twice = sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in zip(corners, [*corners[1:], corners[0]], strict=True))
    assert abs(twice) / 2 == pytest.approx(tile.area, rel=0.002)
    assert {y for _, y in corners} <= set(np.arange(1000, 1400.5, 0.5))
    assert all(200 <= x <= 700 for x, _ in corners)


def test_colours_go_from_dark_to_light():
    light = [sum(bytes.fromhex(tile_plot.colour(hop, 6)[1:])) for hop in range(7)]
    assert tile_plot.colour(0, 6) == "#440154" and tile_plot.colour(6, 6) == tile_plot.colour(9, 6) == "#fde725"
    assert light == sorted(light) and len(set(light)) == 7
    assert (tile_plot.ink(0, 6), tile_plot.ink(6, 6), tile_plot.ink(0, 0)) == ("white", "black", "white")


@pytest.mark.parametrize(
    "options",
    [
        ["--seq-len", "1K", "--layout", "zigzag"],
        ["--seq-len", "1K", "--layout", "striped", "--window", "100,0"],
        ["--seq-len", "9", "--full", "--documents", "2,7"],
        ["--seq-len", "3"],
        ["--seq-len", "1K", "--layout", "balanced", "--prefix", "100", "--documents", "300,724"],
        ["--seq-len", "1K", "--layout", "balanced", "--window", "99,0", "--sinks", "4"],
    ],
)
def test_a_picture_is_written(tmp_path, options):
    path = tmp_path / "tiles.png"
    done = invoke("-r", "4", "--plot", str(path), *options)
    assert done.exit_code == 0, done.output
    from PIL import Image

    with Image.open(path) as picture:
        assert picture.size == (1000, 540)
        colours = {
            f"#{r:02x}{g:02x}{b:02x}" for r, g, b in np.unique(np.array(picture.convert("RGB")).reshape(-1, 3), axis=0)
        }
    assert {tile_plot.colour(0, 3), "#ffffff"} <= colours


@pytest.mark.parametrize("sinks", [1, 4])
def test_a_few_sinks_are_seen(tmp_path, sinks):
    """Of 16,384 keys they are less than a pixel, and yet each rank has a line in the colour of its hop beside them."""
    from PIL import Image

    path = tmp_path / "tiles.png"
    invoke("--seq-len", "16K", "-r", "4", "--window", "999,0", "--sinks", str(sinks), "--plot", str(path))
    with Image.open(path) as picture:
        left = np.array(picture.convert("RGB"), dtype=int)[:, 40:80]
    for hop in (1, 2, 3):
        shade = list(bytes.fromhex(tile_plot.colour(hop, 3)[1:]))
        assert np.any(np.abs(left - shade).sum(2) < 60, axis=1).sum() > 90, "a quarter of some 414 pixels"


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    done = invoke("--seq-len", "8", "-r", "2", "--plot", str(tmp_path / "tiles.png"))
    assert str(done.exception) == "--plot needs matplotlib: pip install usp-attention[plot]"
    assert not (tmp_path / "tiles.png").exists()


def test_matplotlib_is_not_needed_for_text():
    code = (
        "import sys\nfrom usp.cli.app import app\n"
        "try:\n    app(['explain', '--seq-len', '8', '-r', '2'])\n"
        "except SystemExit as done:\n    assert not done.code\n"
        "print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


# ---- what is printed -------------------------------------------------------------------------------------------------


def test_the_text_by_hand():
    done = usp("explain", "--seq-len", "8", "-r", "2", "--layout", "contiguous")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines() == [
        "contiguous over a ring of 2: 8 tokens, causal",
        "",
        "Positions",
        "  rank 0: 0-3 (4 tokens)",
        "  rank 1: 4-7 (4 tokens)",
        "",
        "Tiles: queries down, keys across, named by the ranks that hold them; the hop, 0 1; . nothing visible",
        "        0       1",
        "rank 0  00..............",
        "        0000............",
        "        000000..........",
        "        00000000........",
        "rank 1  1111111100......",
        "        111111110000....",
        "        11111111000000..",
        "        1111111100000000",
        "",
        "Visible pairs per hop (rank r with the keys of rank r - hop); calls: kernel calls of a rank",
        "        hop      rank 0     rank 1  max/mean   calls",
        "          0          10         10      1.00       1  " + "█" * 15,
        "          1           0         16      2.00       1  " + "█" * 12 + "░" * 12,
        "        all          10         26      1.44       2",
        "",
        "A rank waits 31% of the time: every hop takes as long as its slowest rank.",
        "Blocks move 1 of 1 hops.",
        "zigzag would take 0.69 of the time.",
    ]


def test_text_for_a_terminal_that_knows_ascii_only(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = usp("explain", "--seq-len", "8", "-r", "2")
    assert done.returncode == 0, done.stderr
    assert "#" * 12 + "-" * 12 in done.stdout


def test_a_wide_axis_is_named_downwards():
    lines = invoke("--seq-len", "1K", "-r", "12", "--layout", "striped").stdout.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("Tiles"))
    assert "take turns" in lines[start + 1]
    assert [line.strip() for line in lines[start + 2 : start + 4]] == [
        "11          11          11          11",
        "012345678901" * 4,
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "causal"),
        ({"causal": False, "window": "1K,-1"}, "full, window 1,024 back and no bound ahead"),
        ({"documents": "3K, 5K"}, "causal, 2 documents"),
        ({"causal": False, "documents": "8192"}, "full, 1 document"),
        ({"window": "99,0", "chunk": 2048, "sinks": 4}, "causal, window 99 back and 0 ahead, chunks of 2,048, 4 sinks"),
        ({"sinks": 1, "prefix": 1024, "documents": "8K"}, "causal, 1 sink, prefix of 1,024, 1 document"),
    ],
)
def test_masks_in_words(options, words):
    assert describe_mask(Workload.read(MaskOptions(seq_len=8192, **options).fields())) == words


def test_mask_options_are_the_fields_of_a_workload():
    options = MaskOptions(8192, True, window="4095,-1", chunk=512, sinks=4, prefix=100, documents="3K,5K")
    assert options.fields() == {
        "seq_len": 8192,
        "is_causal": True,
        "window_size": (4095, -1),
        "chunk": 512,
        "sinks": 4,
        "prefix": 100,
        "documents": (3072, 5120),
    }
    nothing = {"seq_len": 8, "window_size": None, "chunk": None, "sinks": 0, "prefix": 0, "documents": ()}
    for said, default, causal in ((None, True, True), (None, False, False), (True, False, True), (False, True, False)):
        assert MaskOptions(8, said).fields(causal=default) == nothing | {"is_causal": causal}


@pytest.mark.parametrize(
    ("options", "option", "message"),
    [
        ({"window": "3"}, "--window", "'3' is not LEFT,RIGHT: give two counts of tokens like 4095,0"),
        ({"window": "1,2,3"}, "--window", "is not LEFT,RIGHT"),
        ({"window": "-2,0"}, "--window", "is not LEFT,RIGHT"),
        ({"documents": "3,x"}, "--documents", "'x' is not a number of tokens"),
        ({"documents": "0,8"}, "--documents", "'0' is not between 1 and 2"),
        ({"documents": "3,4"}, "--documents", "the documents add up to 7 tokens and the global sequence has 8"),
    ],
)
def test_a_wrong_mask_option_is_named(options, option, message):
    with pytest.raises(typer.BadParameter) as caught:
        MaskOptions(8, **options).fields()
    assert caught.value.param_hint == option
    assert message in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--seq-len", "8x", "-r", "2"], 2, "--seq-len"),
        (["--seq-len", "0", "-r", "2"], 2, "--seq-len"),
        (["--seq-len", "9" * 400, "-r", "2"], 2, "--seq-len"),
        (["--seq-len", "8", "-r", "0"], 2, "--ring-degree"),
        (["--seq-len", "8"], 2, "--ring-degree"),
        (["--seq-len", "8", "-r", "2", "--window", "9" * 400 + ",0"], 2, "--window"),
        (["--seq-len", "8", "-r", "2", "--documents", "3,4"], 2, "--documents"),
        (["--seq-len", "8", "-r", "2", "--sinks", "0"], 2, "--sinks"),
        (["--seq-len", "8", "-r", "2", "--prefix", "9"], 1, "usp: Workload: prefix=9 is more than seq_len=8"),
        (["--seq-len", "1M", "-r", "2", "--chunk", "9"], 1, "usp: Workload: chunk=9 cuts seq_len=1048576 into more"),
        (["--seq-len", "8", "-r", "2", "--layout", "balanced[:0]"], 1, "usp: unknown layout 'balanced[:0]'"),
        (["--seq-len", "8", "-r", "2", "--layout", "zigzga"], 1, "usp: unknown layout 'zigzga': there are"),
        (
            ["--seq-len", "8", "-r", "2", "--plot", "/nowhere/x.png"],
            1,
            "usp: cannot write /nowhere/x.png: No such file",
        ),
        (["--seq-len", "8", "-r", "2", "--plot", "x.tiles"], 1, "usp: cannot write x.tiles: Format 'tiles' is not"),
    ],
)
def test_errors_are_words_and_exit_codes(args, code, message):
    done = usp("explain", *args)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# ---- the document ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["-r", "4", "--layout", "zigzag"],
        ["-r", "3", "--layout", "striped", "--full", "--documents", "3K,1K"],
        ["-r", "200", "--window", "100,0"],
        ["-r", "1"],
        ["-r", "4", "--layout", "balanced", "--chunk", "1K", "--sinks", "4", "--prefix", "100", "--documents", "3K,1K"],
    ],
)
def test_the_document_fits_its_schema(options):
    done = invoke("--seq-len", "4K", "--json", *options)
    assert done.exit_code == 0
    schema = Explanation.model_json_schema()
    document = json.loads(done.stdout)
    assert fits(document, schema, schema) == []
    assert Explanation.model_validate_json(done.stdout, strict=True).model_dump(mode="json") == document
    assert (document["sampled"] is None) == (options[1] != "200")


def test_a_document_that_does_not_fit_is_found():
    schema = Explanation.model_json_schema()
    document = json.loads(invoke("--seq-len", "8", "-r", "2", "--json").stdout)
    for broken in (
        {**document, "extra": 1},
        {name: value for name, value in document.items() if name != "hops"},
        {**document, "balance": "1"},
        {**document, "ranks": [{**document["ranks"][0], "positions": [[0, 4]]}]},
    ):
        assert fits(broken, schema, schema)


def test_the_document_by_hand():
    done = invoke("--seq-len", "8", "-r", "2", "--json")
    assert done.stderr.startswith("contiguous over a ring of 2: 8 tokens, causal")
    document = json.loads(done.stdout)
    zigzag = next(layout for layout in document.pop("layouts") if layout["layout"] == "zigzag")
    assert zigzag == {
        "layout": "zigzag", "relative_time": 18 / 26, "tiles": 2, "hops_moved": 1, "sampled": False,
    }  # fmt: skip
    assert document == {
        "schedule": ":0 contiguous S=8 R=2",
        "ring_degree": 2,
        "seq_len": 8,
        "layout": "contiguous",
        "mask": ":0",
        "ranks": [
            {"rank": 0, "positions": [[0, 4, 1]], "tokens": 4, "work": 10},
            {"rank": 1, "positions": [[4, 8, 1]], "tokens": 4, "work": 26},
        ],
        "hops": [
            {"hop": 0, "stands_for": 1, "max": 10, "mean": 10.0, "max_over_mean": 1.0, "tiles": 1},
            {"hop": 1, "stands_for": 1, "max": 16, "mean": 8.0, "max_over_mean": 2.0, "tiles": 1},
        ],
        "balance": 26 / 18,
        "waiting": pytest.approx(1 - 18 / 26),
        "hops_moved": 1,
        "better_layout": "zigzag",
        "sampled": None,
    }


def test_help_shows_examples():
    done = invoke("--help")
    assert done.exit_code == 0 and "usp explain --seq-len 128K" in done.stdout
