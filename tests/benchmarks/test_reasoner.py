"""The reasoner's problems, its tokenizer, and the shipped checkpoint."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.reasoner import recall, train
from benchmarks.reasoner.model import Reasoner
from benchmarks.reasoner.problems import Problem, grade
from benchmarks.reasoner.programs import KEPT, MAX_LINES, NUM_INPUTS, RECENT
from benchmarks.reasoner.tasks import DEFAULT_SIZE, TASKS, make_problem
from benchmarks.reasoner.tokenizer import EOS, SYMBOLS, TOKEN_IDS, VOCABULARY, encode
from kvllm import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "kvllm" / "assets" / "reasoner"
CONTEXT = 4096
seeds = st.integers(0, 2**32)
every_task = pytest.mark.parametrize("task", TASKS)


def solve(prompt: str) -> tuple[list[tuple], str]:
    """Run a program by following its labels: (label, x, a, sign, y, b, z, result) of each line, and the answer."""
    first, *program, question = prompt.splitlines()
    registers = {pair[0]: int(pair[1]) for pair in first.split(": ")[1].split(",")}
    lines = {line[0]: line for line in program}
    label, steps = "#", []
    while label in lines:
        x, sign, y, z = re.findall(r"^.>(.)([+-])(.)=(.)$", lines.pop(label))[0]
        a, b = registers[x], registers[y]
        assert z not in registers, "a name is written twice"
        registers[z] = {"+": a + b, "-": a - b}[sign] % 10
        steps.append((label, x, a, sign, y, b, z, registers[z]))
        label = z
    assert not lines, "the chain of labels misses a line"
    assert question[:3] == f"{label}>?"
    return steps, "".join(f"{name}{registers[name]}" for name in question[3:].split(","))


@given(seed=seeds, lines=st.integers(1, MAX_LINES))
def test_a_dense_working_is_what_an_independent_interpreter_writes(seed: int, lines: int) -> None:
    problem = make_problem(random.Random(seed), lines, "dense")
    steps, answer = solve(problem.prompt)
    written = [f"{label}>{x}{a}{sign}{y}{b}={z}{result}" for label, x, a, sign, y, b, z, result in steps]
    assert problem.working.splitlines() == [*written, f"{steps[-1][6]}>?{answer}"]
    assert problem.answer == answer


@given(seed=seeds, lines=st.integers(1, MAX_LINES), task=st.sampled_from(["program", "long"]))
def test_a_working_in_words_says_what_an_independent_interpreter_finds(seed: int, lines: int, task: str) -> None:
    problem = make_problem(random.Random(seed), lines, task)
    steps, answer = solve(problem.prompt)
    *sentences, end = problem.working.splitlines()
    assert end == f"at {steps[-1][6]} all is done, so the answer is ?{answer}" and problem.answer == answer
    for sentence, (label, x, a, sign, y, b, z, result) in zip(sentences, steps, strict=True):
        raw = a + b if sign == "+" else a - b
        assert sentence.startswith(f"at {label} we have {x}{sign}{y}={z}. now {x}{a} and {y}{b}, so we get {raw}")
        assert ("over ten" in sentence) == (raw > 9) and ("below zero" in sentence) == (raw < 0)
        assert f", that is {z}{result}." in sentence
        assert ("check" in sentence) == (task == "long")
        assert set(re.findall(r"\b[a-zA-Z]\d", sentence)) == {f"{x}{a}", f"{y}{b}", f"{z}{result}"}


def named_digits(working: str) -> dict[str, str]:
    return dict(re.findall(r"that is ([a-zA-Z])(\d) and carry", working))


@given(seed=seeds, places=st.integers(3, 52))
def test_additions_add_up(seed: int, places: int) -> None:
    problem = make_problem(random.Random(seed), places, "addition")
    columns = re.findall(r"(\d)\+(\d)=([a-zA-Z]),", problem.prompt)
    first, second = (int("".join(column[i] for column in columns[::-1])) for i in (0, 1))
    total = f"{first + second:0{places}}"[-places:]
    digits = named_digits(problem.working)
    assert "".join(digits[name] for _, _, name in columns[::-1]) == total
    asked = problem.prompt.splitlines()[-1][1:].split(",")
    assert problem.answer == "".join(name + digits[name] for name in asked)


@given(seed=seeds, places=st.integers(3, 52))
def test_multiplications_multiply(seed: int, places: int) -> None:
    problem = make_problem(random.Random(seed), places, "multiplication")
    factor = int(problem.prompt.split()[1][:-1])
    columns = re.findall(r"(\d)=([a-zA-Z]),", problem.prompt)
    number = int("".join(digit for digit, _ in columns[::-1]))
    product = f"{number * factor:0{places}}"[-places:]
    digits = named_digits(problem.working)
    assert "".join(digits[name] for _, name in columns[::-1]) == product
    asked = problem.prompt.splitlines()[-1][1:].split(",")
    assert problem.answer == "".join(name + digits[name] for name in asked)


@given(seed=seeds, size=st.integers(4, 52), task=st.sampled_from(["recall", "needle"]))
def test_facts_to_recall_are_in_the_prompt(seed: int, size: int, task: str) -> None:
    problem = make_problem(random.Random(seed), size, task)
    *text, question = problem.prompt.splitlines()
    found = [name + value for name in question[1:].split(",") for value in re.findall(rf"{name}(\d{{3}})", text[0])]
    assert problem.answer == "".join(found) and len(found) == len(question[1:].split(","))


def test_a_needle_lies_at_its_depth() -> None:
    for depth in (0.0, 0.5, 1.0):
        (text, _) = recall.hide(random.Random(3), 40, [depth]).prompt.splitlines()
        before = text.partition("note that")[0].count(". ")
        assert before == round(40 * depth)


def test_problems_depend_on_the_seed_alone() -> None:
    first, again, other = (make_problem(random.Random(seed)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_lines_are_shuffled_and_half_of_the_operands_reach_far_back() -> None:
    rng, far, near = random.Random(1), 0, 0
    for _ in range(50):
        problem = make_problem(rng, MAX_LINES, "dense")
        labels = [line[0] for line in problem.prompt.splitlines()[1:-1]]
        steps, _ = solve(problem.prompt)
        in_order = [step[0] for step in steps]
        assert labels != in_order and sorted(labels) == sorted(in_order)
        order = [pair[0] for pair in problem.prompt.splitlines()[0].split(": ")[1].split(",")]
        order += [step[6] for step in steps]
        for i, step in enumerate(steps, start=NUM_INPUTS):
            for name in (step[1], step[4]):
                distance = i - order.index(name)
                assert distance <= RECENT or order.index(name) % KEPT == 0
                far, near = far + (distance > RECENT), near + (distance <= RECENT)
    assert 0.25 < far / (far + near) < 0.35


@pytest.mark.parametrize(
    ("task", "size", "message"),
    [
        ("program", 0, f"lines is 0.*1 to {MAX_LINES}"),
        ("dense", MAX_LINES + 1, f"lines is {MAX_LINES + 1}.*1 to {MAX_LINES}"),
        ("addition", 53, "places is 53.*3 to 52"),
        ("recall", 2, "pairs is 2.*3 to 52"),
        ("needle", 0, "sentences is 0"),
        ("chess", 8, "task is 'chess'; choose one of dense, program"),
    ],
)
def test_refuses_what_it_cannot_make(task: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_problem(random.Random(0), size, task)


def test_grade_tells_a_right_answer_from_exact_working() -> None:
    problem = make_problem(random.Random(5), 6)
    first, rest = problem.working.split("\n", 1)
    slip = first[:-2] + str((int(first[-2]) + 1) % 10) + ".\n" + rest
    wrong = problem.working[:-1] + str((int(problem.working[-1]) + 1) % 10)
    assert grade(problem, problem.working) == (True, True)
    assert grade(problem, slip) == (True, False)
    assert grade(problem, wrong) == (False, False)
    assert grade(problem, "") == (False, False)


@every_task
def test_the_largest_problems_fit_the_context(task: str) -> None:
    for seed in range(20):
        problem = make_problem(random.Random(seed), TASKS[task].largest, task)
        assert len(encode(problem.prompt + problem.working)) < CONTEXT


def test_the_default_task_has_long_workings_with_few_facts() -> None:
    working = make_problem(random.Random(0)).working
    tokens = len(encode(working))
    results = len(re.findall(r"that is [a-zA-Z]\d", working))
    assert tokens >= 1000 and results == DEFAULT_SIZE
    assert 2 * results / tokens < 0.1  # a name and its value, stated once for good


@every_task
def test_the_tokenizer_of_the_checkpoint_maps_words_to_tokens_and_back(task: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    problem = make_problem(random.Random(7), TASKS[task].largest, task)
    text = problem.prompt + problem.working
    ids = tokenizer.encode(text)
    assert ids == encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(tokenizer.decode([i]) for i in ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_every_token_has_an_id_of_its_own() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert tokenizer.get_vocab() == TOKEN_IDS and len(TOKEN_IDS) == len(VOCABULARY)
    assert tokenizer.eos_token_id == TOKEN_IDS[EOS]
    assert tokenizer.encode(SYMBOLS.replace("", " ")[1:])  # single letters are names, whatever stands beside them


def test_checkpoint_is_small() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 25_000_000


def held_out(task: str, size: int, count: int) -> list[Problem]:
    """Problems that training never draws."""
    rng = random.Random(f"held out/{task}/{size}")
    return [make_problem(rng, size, task) for _ in range(count)]


def most_tokens(problems: list[Problem]) -> int:
    return max(len(encode(problem.working)) for problem in problems) + 16


def answer_with_engine(checkpoint: Path, problems: list[Problem]) -> list[str]:
    llm = LLM(checkpoint, dtype="float32", block_size=16, num_gpu_blocks_override=257)
    params = SamplingParams(temperature=0, max_tokens=most_tokens(problems))
    return [output.outputs[0].text for output in llm.generate([p.prompt for p in problems], params, use_tqdm=False)]


@pytest.mark.long
def test_transformers_solves_new_problems_greedily_and_stops() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    (problem,) = held_out("program", DEFAULT_SIZE, 1)
    prompt = tokenizer(problem.prompt, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=len(encode(problem.working)) + 50)
    generated = output[0, prompt.input_ids.shape[1] :]
    assert len(generated) == len(encode(problem.working)) + 1, "generation stops at the end-of-sequence token"
    assert grade(problem, tokenizer.decode(generated, skip_special_tokens=True)) == (True, True)


@pytest.mark.parametrize(
    ("task", "size"), [pytest.param("program", 10, marks=pytest.mark.long), ("addition", 8), ("needle", 20)]
)
def test_the_engine_writes_what_transformers_writes(task: str, size: int) -> None:
    problems, tokenizer = held_out(task, size, 3), AutoTokenizer.from_pretrained(CHECKPOINT)
    batch = tokenizer([problem.prompt for problem in problems], return_tensors="pt", padding=True)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    with torch.inference_mode():
        output = model.generate(**batch, max_new_tokens=most_tokens(problems), do_sample=False)
    texts = tokenizer.batch_decode(output[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    assert answer_with_engine(CHECKPOINT, problems) == texts
    assert sum(grade(problem, text)[0] for problem, text in zip(problems, texts, strict=True)) >= 2


def training_run() -> dict[str, torch.Tensor]:
    """The weights after 5 steps."""
    torch.manual_seed(0)
    model = Reasoner(len(TOKEN_IDS))
    with torch.compiler.set_stance("force_eager"):
        numbers = train.train(model, 2_200, seed=0)
    assert numbers["step"] == 5
    return model.state_dict()


@pytest.mark.long
def test_training_again_gives_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "BATCH_TOKENS", 512)
    for name, value in {"SHARES": {"program": 1.0}, "GROW_WINDOW": 1, "GROW_ACCURACY": -1.0}.items():
        monkeypatch.setattr(train, name, value)  # problems grow with every batch of the largest
    first, second = training_run(), training_run()
    for name, weights in first.items():
        assert torch.equal(weights, second[name]), name


def test_signs_weigh_once_names_are_known_and_problems_grow_once_signs_are() -> None:
    curriculum = train.Curriculum()
    largest = round(curriculum.reach * TASKS["program"].largest)
    plus, name = TOKEN_IDS["+"], TOKEN_IDS["K"]

    def learn(looked_up: float, signs: float) -> None:
        for _ in range(train.GROW_WINDOW):
            curriculum.update("program", largest, looked_up, signs)
            curriculum.update("program", largest - 1, 0.0, 0.0)  # smaller problems say nothing

    learn(0.7, 0.5)
    assert curriculum.weights()[plus] == curriculum.weights()[name] == 1
    learn(0.99, 0.5)
    assert curriculum.weights()[plus] == train.SIGN_WEIGHT and curriculum.weights()[name] == 1
    assert curriculum.reach == train.FIRST_REACH
    learn(0.99, 0.99)
    assert curriculum.reach == train.FIRST_REACH * train.GROWTH


def test_the_earlier_weights_are_a_checkpoint_of_the_same_kind() -> None:
    earlier = ROOT / "benchmarks" / "reasoner" / "earlier"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (earlier / name).read_bytes() == (CHECKPOINT / name).read_bytes(), name
    others, shipped = (load_file(path / "model.safetensors") for path in (earlier, CHECKPOINT))
    assert others.keys() == shipped.keys() and {tensor.dtype for tensor in others.values()} == {torch.bfloat16}
    assert not any(torch.equal(tensor, shipped[name].bfloat16()) for name, tensor in others.items())
    problems = held_out("program", 6, 4)
    answers = answer_with_engine(earlier, problems)
    assert [grade(problem, text) for problem, text in zip(problems, answers, strict=True)] == [(True, True)] * 4
