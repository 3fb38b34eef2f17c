"""The reasoner's problems, its tokenizer, and the shipped checkpoint."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.reasoner.problems import DEFAULT_LINES, MAX_LINES, SYMBOLS, grade, make_problem

CHECKPOINT = Path(__file__).parents[1] / "kvllm" / "assets" / "reasoner"


def solve(prompt: str) -> list[str]:
    """Run the program in `prompt` by following its labels; return the lines of its working."""
    inputs, *program, question = prompt.splitlines()
    registers = {pair[0]: int(pair[1]) for pair in inputs.split(",")}
    lines = {line[0]: line for line in program}
    label, working = "#", []
    while label in lines:
        x, sign, y, z = re.findall(r"^.>(.)([+-])(.)=(.)$", lines.pop(label))[0]
        a, b = registers[x], registers[y]
        assert z not in registers, "a name is written twice"
        registers[z] = {"+": a + b, "-": a - b}[sign] % 10
        working.append(f"{label}>{x}{a}{sign}{y}{b}={z}{registers[z]}")
        label = z
    assert not lines, "the chain of labels misses a line"
    assert question[:3] == f"{label}>?"
    return [*working, question[:3] + "".join(f"{name}{registers[name]}" for name in question[3:])]


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), lines=st.integers(1, MAX_LINES))
def test_working_is_what_an_independent_interpreter_writes(seed, lines):
    problem = make_problem(random.Random(seed), lines)
    assert problem.working.splitlines() == solve(problem.prompt)
    assert problem.working.endswith("?" + problem.answer)
    assert set(problem.prompt + problem.working) <= set(SYMBOLS)
    assert len(problem.working.splitlines()) == lines + 1


def test_problems_depend_on_the_seed_alone():
    first, again, other = (make_problem(random.Random(seed)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert (len(first.prompt), len(first.working)) == (len(other.prompt), len(other.working))


def test_lines_are_shuffled_and_operands_reach_all_the_way_back():
    problem = make_problem(random.Random(0))
    labels = [line[0] for line in problem.prompt.splitlines()[1:-1]]
    in_order = [line[0] for line in problem.working.splitlines()[:-1]]
    assert labels != in_order and sorted(labels) == sorted(in_order)

    rng, reach = random.Random(1), []
    for _ in range(50):
        *working, _ = make_problem(rng).working.splitlines()
        written = {line[8]: i for i, line in enumerate(working)}
        for i, line in enumerate(working):
            # Inputs count as written just before the first line; a uniform operand then lies half-way back on average.
            reach += [(i - written.get(x, -1)) / (i + 1) for x in (line[2], line[5]) if i >= DEFAULT_LINES // 2]
    assert sum(reach) / len(reach) == pytest.approx(0.55, abs=0.07)


@pytest.mark.parametrize("lines", [0, MAX_LINES + 1])
def test_refuses_lines_it_has_no_names_for(lines):
    with pytest.raises(ValueError, match=f"lines is {lines}.*1 to {MAX_LINES}"):
        make_problem(random.Random(0), lines)


def test_grade_tells_a_right_answer_from_exact_working():
    problem = make_problem(random.Random(5), 6)
    first, rest = problem.working.split("\n", 1)
    slip = first[:-1] + str((int(first[-1]) + 1) % 10) + "\n" + rest
    wrong = problem.working[:-1] + str((int(problem.working[-1]) + 1) % 10)
    assert grade(problem, problem.working) == (True, True)
    assert grade(problem, slip) == (True, False)
    assert grade(problem, wrong) == (False, False)
    assert grade(problem, "") == (False, False)


def test_tokenizer_maps_every_character_to_one_token_and_back():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    problem = make_problem(random.Random(7))
    text = SYMBOLS + "\n\n" + problem.prompt + problem.working
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert "".join(tokenizer.decode([i]) for i in ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert len({*tokenizer.get_vocab().values()}) == len(SYMBOLS) + 2


def test_checkpoint_is_small():
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 10_000_000


@pytest.mark.parametrize("lines", [8, DEFAULT_LINES])
def test_transformers_solves_new_problems_greedily_and_stops(lines):
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    rng = random.Random("tests/test_reasoner.py")
    problems = [make_problem(rng, lines) for _ in range(2)]
    prompts = tokenizer([p.prompt for p in problems], return_tensors="pt")
    output = model.generate(**prompts, max_new_tokens=len(problems[0].working) + 50)
    generated = output[:, prompts.input_ids.shape[1] :]
    assert generated.shape[1] == len(problems[0].working) + 1, "generation stops at the end-of-sequence token"
    texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
    assert [grade(p, t) for p, t in zip(problems, texts, strict=True)] == [(True, True)] * 2
