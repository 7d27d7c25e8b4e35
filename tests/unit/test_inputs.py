"""Whatever a file, a command line or a batch holds, the answer is a result or an error of one line."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import usp
from tests.fuzz_inputs import FILES, VALUES, wrong, wrong_with_arguments, wrong_with_file
from tests.unit.strategies import examples
from usp.data import LongContextCollator
from usp.errors import InputError

SEEDS = range(400)
"""Of `tests.fuzz_inputs`, which searches for longer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("inputs")


def test_mutations_of_files_and_options(folder):
    found = [text for seed in SEEDS if (text := wrong(seed, folder))]
    assert not found, "\n\n".join(found)


@examples(60)
@given(content=st.binary(max_size=300), which=st.integers(0, len(FILES) - 1))
def test_any_bytes_as_a_file(folder, content, which):
    assert not wrong_with_file(FILES[which][0], content, folder)


@examples(40)
@given(
    arguments=st.lists(st.sampled_from(VALUES) | st.text(max_size=9), max_size=5),
    name=st.sampled_from(["plan", "explain", "topology", "trace", "probe"]),
)
def test_any_text_as_arguments(folder, name, arguments):
    assert not wrong_with_arguments([name, *arguments], folder)


tokens = st.integers(-3, 2**40) | st.none() | st.text(max_size=3) | st.floats()
documents = st.lists(st.lists(tokens, max_size=9) | st.binary(max_size=9) | st.text(max_size=9) | st.none(), max_size=6)


@examples(100)
@given(documents=documents, seq_len=st.integers(-1, 20), separator=st.none() | st.integers(-2, 300))
def test_any_documents_in_a_batch(documents, seq_len, separator):
    """None is lost: as many tokens come out as went in, with their separators."""
    try:
        made = LongContextCollator(seq_len, separator=separator)(documents)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert sum(batch["input_ids"].numel() for batch in made.batches) % seq_len == 0


FORBIDDEN = {
    "pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "eval", "exec", "all_gather_object",
    "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list",
    "unsafe_load", "full_load",
}  # fmt: skip
"""What runs code that a file or another rank holds."""


@pytest.mark.parametrize("path", sorted(Path(usp.__file__).parent.rglob("*.py")), ids=lambda path: path.stem)
def test_no_code_is_taken_from_files_or_ranks(path):
    tree = ast.parse(path.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "re"
    }
    names |= {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    loads = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "load"}
    assert not names & FORBIDDEN
    assert not loads & {"yaml.load", "torch.load", "pickle.load"}
