import pytest

from xla_fsdp.wording import first_line, join_some, runs, to_one_line


def test_what_others_say_fits_on_a_line():
    assert to_one_line(ValueError("one\n  two\tthree")) == "one two three"
    assert to_one_line("\x1b[31mred") == " [31mred"
    assert to_one_line("x" * 12, 10) == "x" * 10 + "..." and to_one_line("x" * 10, 10) == "x" * 10


@pytest.mark.parametrize("text", ["", "  \n\n"])
def test_an_exception_without_words_is_its_type(text):
    assert to_one_line(KeyboardInterrupt(text)) == "KeyboardInterrupt"
    assert first_line(ValueError(text)) == "ValueError"
    assert first_line(text) == ""


def test_the_first_line_is_the_first_with_words():
    assert first_line(RuntimeError("\n  no store\nframe #0: c10::Error")) == "no store"
    assert first_line("abcdef", 3) == "abc..."


def test_some_of_many_says_how_many_are_left():
    assert join_some(["a", "b"], 2) == "a, b"
    assert join_some(["a", "b", "c"], 1) == "a and 2 more"
    assert join_some(["a", "b", "c"], 2, "; ") == "a; b; and 1 more"
    assert join_some([], 2) == ""


def test_runs_of_numbers():
    assert runs("rank", [5, 1, 0, 2]) == "ranks 0-2, 5"
    assert runs("worker", [3]) == "worker 3"
