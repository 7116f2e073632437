"""`paceline doctor`: real scripts, real ranks; what it finds wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.command_line import Main, in_process
from support.marks import some_long
from support.node import command, paceline, script
from support.waiting import TRAINING_S, until

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]
FAULTY = str(ROOT / "tests" / "support" / "faulty_script.py")


def examined(path: str, *arguments: str, options: tuple[str, ...] = ()) -> tuple[int, Any]:
    """The exit code, and the JSON document."""
    process = paceline("doctor", "--json", *options, path, *arguments)
    out, err = process.communicate(timeout=TRAINING_S)
    assert "Traceback" not in err, err
    return process.returncode, json.loads(out)


def faulty(folder: Path, faults: str, *more: str, options: tuple[str, ...] = ()) -> tuple[int, Any]:
    return examined(FAULTY, "--faults", faults, "--folder", str(folder), *more, options=options)


def levels(document: Any) -> dict[str, set[str]]:
    """Check → its findings' levels."""
    kinds: dict[str, set[str]] = {}
    for finding in document["findings"]:
        kinds.setdefault(finding["check"], set()).add(finding["level"])
    return kinds


def the(document: Any, check: str, level: str) -> Any:
    (finding,) = (f for f in document["findings"] if (f["check"], f["level"]) == (check, level))
    return finding


def test_a_script_without_a_fault(tmp_path: Path) -> None:
    code, document = faulty(tmp_path, "", "--workers", "1")
    assert (code, document["problems"], document["ranks"]) == (0, 0, 2)
    assert {level for kinds in levels(document).values() for level in kinds} == {"ok"}, document
    sizes = the(document, "sizes", "ok")
    assert "dataset.sizes: 3 to 40" in sizes["says"]
    assert 1 < sizes["figures"]["padded"] < sizes["figures"]["uneven"] < 2
    assert "loss_mean='samples' fits the loss" in the(document, "loss", "ok")["says"]
    assert "faulty_script.py:" in the(document, "session", "ok")["says"]
    assert "a temporary folder, which is deleted" in the(document, "checkpoint", "ok")["says"]
    # It was ended after its steps, and its own folder was left as it was.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "check", "says"),
    some_long(
        [
            ("second", "model", "discriminator = session.wrap(discriminator)"),
            ("iterable", "refused", "dataset has no len()"),
            ("raises", "script", "On rank 1: faulty_script.py:"),
            ("dies", "script", "rank 1 was killed by SIGKILL"),
        ]
    ),
)
def test_a_fault_is_found_and_no_other(tmp_path: Path, fault: str, check: str, says: str) -> None:
    """Further faults are planted by `strangers/test_doctor_faults.py`."""
    code, document = faulty(tmp_path, fault)
    problems = [f for f in document["findings"] if f["level"] == "problem"]
    assert (code, document["problems"]) == (1, 1), document
    assert problems[0]["check"] == check
    assert says in problems[0]["says"]
    assert check in ("refused", "model") or problems[0]["do"]
    assert list(tmp_path.iterdir()) == []


def test_a_stream_is_examined_as_far_as_it_has_no_index(tmp_path: Path) -> None:
    code, document = faulty(tmp_path, "stream")
    assert (code, document["problems"]) == (0, 0), document
    assert "a stream, global batch 16." in the(document, "session", "ok")["says"]
    assert "the data is a stream" in the(document, "loss", "note")["says"]


def test_what_is_to_be_known_is_no_problem(tmp_path: Path) -> None:
    code, document = faulty(tmp_path, "local,dropout,autocast,two,checkpoint")
    assert (code, document["problems"]) == (0, 0), document
    notes = {c for c, kinds in levels(document).items() if "note" in kinds}
    assert notes == {"batchnorm", "random numbers", "precision", "optimizer", "checkpoint"}
    says = " ".join(f["says"] for f in document["findings"] if f["level"] == "note")
    assert "dropout in dropout" in says
    assert "All ranks draw the same random numbers" in says
    assert "bfloat16" in says
    assert "2 optimisers have the wrapped models' parameters" in says


def test_a_script_that_saves_by_itself(tmp_path: Path) -> None:
    code, document = faulty(tmp_path, "checkpoint,states", options=("--nproc", "1"))
    assert (code, document["problems"]) == (0, 0), document
    says = the(document, "checkpoint", "ok")["says"]
    assert "saves or loads the training position itself, at faulty_script.py:" in says
    assert "Any checkpoints of these steps are in the script's usual folder" in says
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"]


def test_a_sharded_model_is_called_on_no_rank_alone(tmp_path: Path) -> None:
    code, document = faulty(tmp_path, "sharded,checkpoint", options=("--timeout", "120"))
    assert (code, document["problems"]) == (0, 0), document
    assert "the model is sharded by fully_shard" in the(document, "loss", "note")["says"]


def test_random_numbers_by_sample_depend_on_no_rank(tmp_path: Path) -> None:
    code, document = faulty(tmp_path, "seeded,alike")
    assert code == 0
    assert levels(document)["random numbers"] == {"ok"}
    assert levels(document)["loss"] == {"ok"}
    assert "equally large" in the(document, "sizes", "ok")["says"]


def test_random_numbers_of_a_batch(tmp_path: Path) -> None:
    """On one rank, of a script that is shorter than the steps asked for."""
    options = ("--nproc", "1", "--steps", "3")
    code, document = faulty(tmp_path, "collate,wrap", "--count", "32", options=options)
    assert (code, document["problems"]) == (1, 1)
    assert "passes no model to session.wrap()" in the(document, "model", "problem")["says"]
    assert "collate_fn draws" in the(document, "random numbers", "note")["says"]
    assert "ended after 2 of 3 steps" in the(document, "steps", "note")["says"]


def test_a_script_that_does_not_come_to_its_steps(tmp_path: Path) -> None:
    code, document = faulty(tmp_path, "sleeps", options=("--timeout", "3"))
    assert code == 1
    assert "within 3 s" in the(document, "steps", "problem")["says"]
    until(lambda: not any(str(tmp_path) in command(p) for p in psutil.process_iter()))


EXAMPLES = {
    "plaid/train.py": {},
    "frameworks/with_accelerate.py": {},
    "frameworks/with_lightning.py": {},
    "frameworks/with_transformers.py": {},
}


@pytest.mark.parametrize("example", some_long(EXAMPLES))
def test_the_examples_are_right(example: str, tmp_path: Path) -> None:
    more = ["--checkpoints", str(tmp_path)] if example.endswith("transformers.py") else []
    code, document = examined(str(ROOT / "examples" / example), *more)
    assert (code, document["problems"]) == (0, 0), document
    assert levels(document)["loss"] == {"ok"}, document
    assert levels(document)["sizes"] == {"ok"}


def test_plain_ddp_is_told_what_to_write() -> None:
    code, document = examined(str(ROOT / "examples/plaid/train_ddp.py"))
    assert code == 1
    assert "session.wrap(model)" in the(document, "session", "problem")["do"]


def test_a_framework_without_its_adapter(tmp_path: Path) -> None:
    example = str(ROOT / "examples/frameworks/with_accelerate.py")
    code, document = examined(example, "--plain")
    assert code == 1
    assert "from paceline.accelerate" in the(document, "session", "problem")["do"]


def test_for_people(tmp_path: Path) -> None:
    faults = "padding,augmented"
    process = paceline("doctor", FAULTY, "--faults", faults, "--folder", str(tmp_path))
    out, err = process.communicate(timeout=TRAINING_S)
    assert process.returncode == 1
    assert "\nproblem  loss: No loss_mean fits the loss" in out
    assert "\nnote     random numbers: The data set uses the process's global random" in out
    assert "\n         → Mask padded positions" in out
    assert out.endswith("1 problem found\n")
    assert "2 steps on 2 ranks" in err


def test_a_script_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main: Main = in_process(monkeypatch, capsys)
    code, out, err = main("doctor", "nowhere.py")
    assert (code, out) == (2, "")
    assert "script: there is no file" in err


def test_the_scripts_folder_comes_first_and_not_the_doctors(tmp_path: Path) -> None:
    """Modules beside the script are the script's, whatever their names."""
    (tmp_path / "padding.py").write_text("WORDS = 'mine'")
    path = script(
        tmp_path,
        """
        import sys
        import padding
        raise SystemExit(f"{padding.WORDS} {__name__} {sys.argv[1:]}")
        """,
    )
    code, document = examined(path, "--lr", "1", options=("--nproc", "1"))
    assert code == 1
    assert "mine __main__ ['--lr', '1']" in the(document, "script", "problem")["says"]
