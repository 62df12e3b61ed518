"""The page of ``ckpt serve``, as a browser gets it."""

from __future__ import annotations

import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt import CheckpointManager
from ckpt.events import SaveCommitted, SaveStaged
from ckpt.exchange.weights.movement import movement
from ckpt.observe import Journal
from ckpt.observe.journal import note_verified
from ckpt.page.prices import Price
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.page.conftest import ARRAYS, Make

HOSTILE = "</td><script>alert(1)</script>\x1b[31m\u202e{{ 7 * 7 }}\"'&"


def text_of(page: str) -> str:
    """Return what a reader sees, in one line."""
    words: list[str] = []
    parser = HTMLParser()
    parser.handle_data = words.append  # type: ignore[method-assign, assignment]
    parser.feed(page)
    return " ".join(" ".join(words).split())


def rows(page: str) -> dict[str, str]:
    """Return step -> the text of its row."""
    table = page.partition('id="steps"')[2]
    found = [text_of(row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
    return {row.split()[0]: row for row in found}


def test_two_roots_that_a_journal_joins_are_one_run(make: Make, run: Path) -> None:
    page = make(run, run.parent / "far").get("/")
    assert "1 run" in text_of(page)
    page = make(run, run.parent / "far", run.parent / "elsewhere").get("/")
    assert "2 runs" in text_of(page)


def test_a_run_shows_its_steps_on_each_tier(make: Make, run: Path) -> None:
    page = make(run, run.parent / "far").get("/run/0")
    found = rows(page)
    assert list(found) == ["step", "400", "300", "200", "100", "50"]
    assert "missed saving" in found["400"]
    assert re.search(r"committed 0.25 s committed 0.25 s 0.2 ", found["200"])
    assert re.search(r"committed 0.25 s – not there 0.3 ", found["300"])
    assert "removed" in found["50"]
    assert "12.3 ms" in found["300"]
    assert "2 ranks" not in page
    reported = text_of(page)
    assert "Newest durable step 300" in reported
    assert "Saves that failed 1" in reported
    assert "OSError" in reported
    assert "1 step for" in reported


def test_a_step_that_was_checked_is_shown_so(make: Make, run: Path) -> None:
    note_verified(str(run), 200, "")
    note_verified(str(run), 300, "1 fault found")
    found = rows(make(run).get("/run/0"))
    assert "verified 0.25 s" in found["200"]
    assert "damaged" in found["300"]
    assert "committed" in found["100"]


def test_the_charts_say_in_words_what_they_show(make: Make, run: Path) -> None:
    page = make(run, run.parent / "far").get("/run/0")
    labels = re.findall(r'role="img" aria-label="([^"]+)"', page)
    assert labels[0] == "loss, steps 50 to 400. Newest: step 400, 0.4; best: step 100, 0.1"
    assert labels[1].startswith("training ")
    assert labels[2] == "Stall of a save, steps 50 to 400. Newest: stall: 12.3 ms"
    assert labels[3].startswith("From the call to the commit, steps 50 to 300.")
    assert page.count('class="dot') == 5 + 4 + 1


def test_the_loss_curve_has_marks_for_what_happened(make: Make, run: Path) -> None:
    page = make(run).get("/run/0")
    texts = re.findall(r'class="mark (\w+)".*?<title>(.*?)</title>', page)
    assert [text for kind, text in texts if kind == "removed"] == ["step 50, removed: 0.05"]
    assert [text for kind, text in texts if kind == "best"] == [
        "step 100, the best that is kept: 0.1"
    ]
    assert [text for kind, text in texts if kind == "failed"] == ["a save that failed at step 350"]
    assert [text for kind, text in texts if kind == "restore"] == ["a restore at step 300"]
    assert len([text for kind, text in texts if kind == "kept"]) == 4
    assert "Best step by loss 100 loss 0.1" in text_of(page)


def test_steps_after_which_the_run_went_back_are_a_line_of_their_own(
    make: Make, tmp_path: Path
) -> None:
    root, state = tmp_path / "run", {"x": torch.ones(2)}
    with CheckpointManager(str(root), on_suspicious="ignore") as manager:
        for step in range(1, 7):
            manager.save(state, step, metrics={"loss": 1 / step})
        manager.restore(state, step=3)
        manager.save(state, 4, metrics={"loss": 0.1})
    page = make(root).get("/run/0")
    assert page.count('class="line branch"') == 1
    assert page.count('class="star"') == 1  # Not at the abandoned attempt at step 4
    texts = re.findall(r'class="mark abandoned".*?<title>(.*?):', page)
    assert texts == [f"step {step}, abandoned, since the run went back" for step in (4, 5, 6)]
    reported = text_of(page)
    assert "Newest durable step 4" in reported
    assert "Best step by loss 4 loss 0.1" in reported
    assert "Steps not durable at the end 0" in reported
    assert "abandoned" in rows(page)["6"]
    shutil.rmtree(next(root.glob("step-*6.*")))
    assert "step 6, abandoned" in make(root).get("/run/0")  # As the journal says


def test_steps_are_sorted_by_a_metric_and_removed_ones_are_folded(make: Make, run: Path) -> None:
    page = make(run)
    for query, order in (("", "400 300 200 100"), ("?sort=loss", "100 200 300 400")):
        text = page.get(f"/run/0{query}")
        assert list(rows(text)) == ["step", *order.split(), "50"]
        folded = text.partition("<details")[2].partition("</details>")[0]
        assert "1 step that is not there any more" in text_of(folded)
        assert [row.split()[0] for row in rows('id="steps"' + folded)] == ["step", "50"]
    assert list(rows(page.get("/run/0?sort=<b>"))) == ["step", "400", "300", "200", "100", "50"]


def test_a_step_has_commands_to_copy(make: Make, run: Path) -> None:
    page = make(run)
    for path in ("/run/0", "/run/0/step/300"):
        text = page.get(path)
        assert f'data-copy="ckpt restore {run} 300 --to restored-300"' in text
        assert f'data-copy="ckpt export {run} step-300.safetensors --step 300"' in text
        assert f'data-copy="ckpt pin {run} 300 --for 1d"' in text
    assert " 50 " not in " ".join(re.findall(r'data-copy="([^"]+)"', page.get("/run/0")))


def test_green_means_that_the_job_lives(make: Make, run: Path) -> None:
    page = make(run)
    shown = page.get("/run/0")
    assert 'class="life lives"' in shown
    assert "Job alive for" in text_of(shown)
    assert "Steps at risk now 100 " in text_of(shown)
    journal = run.parent / "near.journal" / "rank-00000.jsonl"
    text = journal.read_text()
    for end, state, reported in (
        ('{"at": NOW, "event": "Closed", "job": "JOB"}', "ended", "Job ended"),
        ('{"at": NOW, "event": "Closed", "job": "JOB", "reason": "planned stop"}', "stopped",
         "ago, as planned"),
        ('{"at": NOW, "event": "Closed", "job": "JOB", "error": "ValueError", "reason": "no data"}',
         "failed", "ago: ValueError: no data"),
    ):  # fmt: skip
        (job,) = set(re.findall(r'"job":"(\w+)"', text))
        journal.write_text(text + end.replace("JOB", job).replace("NOW", str(time.time())) + "\n")
        page.live._look()
        shown = page.get("/run/0")
        assert f'class="life {state}"' in shown
        assert reported in text_of(shown)
        assert "Steps not durable at the end 100 " in text_of(shown)
    dead = re.sub(r'"start_time":\d+', '"start_time":1', text)
    journal.write_text(dead)
    page.live._look()
    shown = page.get("/run/0")
    assert 'class="life died"' in shown
    assert "saving" not in rows(shown)["400"]
    shutil.rmtree(journal.parent)
    page.live._look()
    assert "Job – no journal" in text_of(page.get("/run/0"))


def test_a_step_is_opened(make: Make, run: Path) -> None:
    reported = text_of(make(run).get("/run/0/step/300"))
    assert "written by 2 ranks" in reported
    assert "model/embed float32 12 × 8 384 B 2" in reported
    assert "rank-00001.safetensors 1" in reported
    assert "compare with step 200" in reported


def test_a_tensor_is_opened_with_its_shards_and_checksums(make: Make, run: Path) -> None:
    page = make(run).get("/run/0/step/300.abcxyz", params={"tensor": "model/embed"})
    shards = re.findall(r"<tr><th scope=\"row\">(\[\d.*?)</tr>", page, re.DOTALL)
    assert [text_of(shard).split()[:7] for shard in shards] == [
        ["[0,", "0]", "6", "×", "8", "0", "rank-00000.safetensors"],
        ["[6,", "0]", "6", "×", "8", "1", "rank-00001.safetensors"],
    ]
    assert all(re.search(r"\b[0-9a-f]{32}\b", shard) for shard in shards)


def test_tensors_are_searched(make: Make, run: Path) -> None:
    reported = text_of(make(run).get("/run/0/step/300", params={"q": "bias"}))
    assert "1 of 2" in reported
    assert "model/embed" not in reported


def test_two_steps_are_compared_by_checksum(make: Make, run: Path) -> None:
    page = make(run)
    reported = text_of(page.get("/run/0/diff?a=200&b=300"))
    assert "Equal 1 tensors" in reported
    assert "Other values 1 model/embed" in reported
    assert (
        "By part of the state part tensors equal other values unlike model/embed 1 0 1 0"
        in reported
    )
    assert "Equal 2 tensors" in text_of(page.get("/run/0/diff?a=100&b=200"))


def test_the_comparison_says_how_far_the_tensors_moved_when_it_is_asked_to(
    make: Make, run: Path
) -> None:
    page = make(run, measure=movement)
    first = page.get("/run/0/diff?a=200&b=300")
    assert "Say how far they moved reads 768 B" in text_of(first)
    reported = text_of(page.get("/run/0/diff?a=200&b=300&values=1"))
    old = ARRAYS["model/embed"]
    moved = f"{100 * np.linalg.norm(np.ones_like(old)) / np.linalg.norm(old):.3g} %"
    assert f"moved most, in percent of the norm: model/embed by {moved}" in reported
    assert f"model/embed {moved} 1" in reported
    assert "what differs was read" in reported


def test_a_difference_too_large_for_the_page_is_left_to_the_command(
    make: Make, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.page.diff_page.MOST_READ_BYTES", 767)
    monkeypatch.setattr("ckpt.page.app.MOST_READ_BYTES", 767)
    page = make(run, measure=movement)
    for query in ("", "&values=1"):
        reported = text_of(page.get(f"/run/0/diff?a=200&b=300{query}"))
        assert f"ckpt diff {run} {run} --step 200 --step 300 --values" in reported
        assert "No data was read" in reported


def test_the_bar_says_where_the_time_went(make: Make, run: Path) -> None:
    page = make(run).get("/run/0")
    assert len(re.findall(r'<rect class="share (\w+)"', page)) == 5
    assert re.search(r"Where the time went .*training \d+\.\d % \(\d+(\.\d+)? \w+\)", text_of(page))


def test_runs_with_a_common_metric_are_on_one_chart(make: Make, run: Path, tmp_path: Path) -> None:
    assert "<figure" not in make(run).get("/")
    for name, losses in (("b", (0.5, 0.25)), ("c", (0.75, 0.125))):
        with CheckpointManager(str(tmp_path / name), on_suspicious="ignore") as manager:
            for step, loss in enumerate(losses, 1):
                manager.save({"x": torch.ones(2)}, step, metrics={"loss": loss, name: loss})
    page = make(run, tmp_path / "b", tmp_path / "c").get("/")
    charts = re.findall(r'role="img" aria-label="([^"]+)"', page)
    assert charts == [
        f"loss, steps 1 to 400. Newest: {run}: 0.4; {tmp_path / 'b'}: 0.25; {tmp_path / 'c'}: 0.125"
    ]


def test_a_tier_with_a_price_shows_what_it_costs_a_month(make: Make, run: Path) -> None:
    assert "a month" not in text_of(make(run).get("/run/0"))
    page = make(run, prices={str(run): Price(1e6)}).get("/run/0")
    assert re.search(r"\$[1-9]\d*\.\d\d a month", text_of(page))
    assert " puts," not in page


def test_a_tier_with_prices_of_requests_shows_how_many_a_save_takes(make: Make, run: Path) -> None:
    """The run has two ranks, and has removed step 50."""
    page = make(run, prices={str(run): Price(0, 1e6, 0)}).get("/run/0")
    assert "6 puts, 7 gets, 6 heads, 5 lists, 6 deletes" in page
    assert re.search(r"30 requests a save, \$\d+\.\d\d a month at one every ", text_of(page))


def test_a_step_that_was_removed_is_not_shown_from_memory(make: Make, run: Path) -> None:
    """It is opened again from the next tier, and is a 404 when no tier has it."""
    page = make(run, run.parent / "far")
    assert f"read from {run}" in text_of(page.get("/run/0/step/200"))
    for tier, status in ((run, 200), (run.parent / "far", 404)):
        shutil.rmtree(next(tier.glob("step-000000200.*")))
        page.live._look()
        shown = page.get("/run/0/step/200", status)
        assert f"read from {run}" not in text_of(shown)


def test_another_layout_is_not_read(make: Make, run: Path) -> None:
    write_checkpoint(open_backend(str(run)), 500, ARRAYS, world_size=3)
    reported = text_of(make(run).get("/run/0/diff?a=200&b=500"))
    assert "Saved in another layout; ckpt diff reads and compares them" in reported


def test_a_damaged_manifest_is_shown_and_hides_no_other_step(make: Make, run: Path) -> None:
    manifest = run / "step-000000300.abcxyz" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    page = make(run)
    found = rows(page.get("/run/0"))
    assert "damaged" in found["300"]
    assert "committed" in found["200"]
    assert "on no tier" in page.get("/run/0/step/300", 404)
    shutil.rmtree(run / "step-000000200.abcxyz")
    assert "This cannot be shown" in page.get("/run/0/step/200", 502)


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/run/1",
        "/run/x",
        "/run/-1",
        "/run/99999999999999999999",
        "/run/0/step/7",
        "/run/0/step/x",
        "/run/0/step/300.other",
        "/run/0/step/..%2f..%2fetc",
        "/run/0/diff?a=7&b=300",
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/none.css",
    ],
)
def test_what_is_not_there_is_a_short_404(make: Make, run: Path, path: str) -> None:
    page = make(run).get(path, 404)
    assert len(page) < 2000
    assert "Traceback" not in page


@pytest.mark.parametrize("number", ["0", "-3", "x", "9" * 40, "2", ""])
def test_any_page_number_is_a_page(make: Make, run: Path, number: str) -> None:
    assert "400" in rows(make(run).get("/run/0", params={"page": number}))


def test_a_comparison_needs_two_steps(make: Make, run: Path) -> None:
    assert "Give two steps" in make(run).get("/run/0/diff?a=300", 400)


def test_an_empty_root_is_a_page_too(make: Make, tmp_path: Path) -> None:
    page = make(tmp_path / "none")
    assert "There is no step yet" in text_of(page.get("/run/0"))
    assert "nothing is safe yet" in text_of(page.get("/"))
    assert list(tmp_path.iterdir()) == []


def test_a_tier_that_cannot_be_opened_is_named(make: Make, run: Path) -> None:
    assert "no backend for" in text_of(make(run, "nosuch://x").get("/run/1"))


@pytest.mark.parametrize(
    "url",
    [
        "nosuch://user:hunter2hunter2hunter2@host/run",
        "nosuch://bucket/run?token=hunter2hunter2hunter2hunter2hunter2",
    ],
)
def test_no_page_shows_the_credentials_of_a_url(make: Make, run: Path, url: str) -> None:
    page = make(run, url)
    assert "hunter2" not in page.live.views[1].name
    for path in ("/", "/run/1", "/run/1/step/7", "/run/1/diff?a=1&b=2"):
        assert "hunter2" not in page.client.get(path).text
    assert "***" in page.get("/run/1")


# -- foreign text ----------------------------------------------------------------------------------


def test_no_text_of_a_checkpoint_becomes_markup(make: Make, tmp_path: Path) -> None:
    root = tmp_path / "run<b>"
    arrays = {HOSTILE: np.ones(3, np.float32), "x": np.ones(3, np.float32)}
    for step in (1, 2):
        write_checkpoint(
            open_backend(str(root)),
            step,
            {HOSTILE: arrays[HOSTILE] * step},
            metadata={"metrics": {HOSTILE: 1.5}},
        )
    journal = Journal(root, rank=0)
    journal(SaveStaged(step=2, nbytes=1, stall_seconds=1, tiers=(HOSTILE,)))
    journal(SaveCommitted(step=2, tier=HOSTILE, nbytes=1, durable_seconds=1))
    journal.close()
    page = make(root)
    for path in (
        "/",
        "/run/0",
        "/run/0/step/2",
        "/run/0/diff?a=1&b=2",
    ):
        text = page.get(path)
        assert "<script>alert" not in text
        assert "run<b>" not in text
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "&lt;script&gt;" in text
    opened = page.get("/run/0/step/2", params={"tensor": HOSTILE, "q": HOSTILE[:9]})
    assert "<script>alert" not in opened
    assert "checksums of its chunks" in opened


def test_the_words_of_a_reader_do_not_become_markup(make: Make, run: Path) -> None:
    for path in ("/run/0/step/300?q=", "/run/0/step/", "/run/0/diff?b=1&a="):
        text = make(run).client.get(path + "<script>alert(1)</script>").text
        assert "<script>alert" not in text


# -- access ----------------------------------------------------------------------------------------


def test_the_page_only_reads(make: Make, run: Path) -> None:
    page = make(run)
    before = sorted(run.parent.rglob("*"))
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert page.client.request(method, "/run/0").status_code == 405
    for path in ("/", "/run/0", "/run/0/step/300", "/run/0/diff?a=200&b=300"):
        page.get(path)
    assert sorted(run.parent.rglob("*")) == before


def test_a_page_of_another_site_cannot_read_this_one(make: Make, run: Path) -> None:
    page = make(run, host="evil.example")
    page.get("/", 421)
    page.get("/", 421, headers={"host": "["})
    headers = make(run).client.get("/run/0").headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert "style=" not in make(run).get("/run/0")


def test_with_a_token_nothing_is_shown_without_it(make: Make, run: Path) -> None:
    token = "correct-horse-battery"
    page = make(run, token=token, host="node7")
    for path in ("/", "/run/0", "/live", "/static/page.css", "/?token=wrong"):
        assert "needs its token" in page.get(path, 401)
    page.get("/", 401, headers={"authorization": "Bearer nope"})
    page.get("/run/0", headers={"authorization": f"Bearer {token}"})
    answer = page.client.get(f"//evil.example/run/0?token={token}&page=1")
    assert (answer.status_code, answer.headers["location"][:2]) != (303, "//")
    answer = page.client.get(f"/run/0?token={token}&page=1")
    assert (answer.status_code, answer.headers["location"]) == (303, "/run/0?page=1")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "samesite=lax" in answer.headers["set-cookie"].lower()
    page.get("/run/0")  # the client has the cookie now


# -- live, and large -------------------------------------------------------------------------------


def test_a_new_step_is_a_new_version(make: Make, run: Path) -> None:
    page = make(run, interval=0.05)
    page.get("/")
    version = page.live.version
    write_checkpoint(open_backend(str(run)), 600, ARRAYS)
    deadline = time.monotonic() + 30
    # a request may come before the manifest, and find the step under way
    while page.live.views[0].tiers[0].newest != 600:
        assert time.monotonic() < deadline
        page.get("/")
    assert "600" in rows(page.get("/run/0"))
    seen = [version]
    # a request sets the version after the views, so the next one has surely done so
    for _ in range(2):
        views = page.live.views
        while page.live.views is views:
            assert time.monotonic() < deadline
            page.get("/")
        seen.append(page.live.version)
    assert seen[0] < seen[1] == seen[2]


@pytest.mark.torture
def test_a_thousand_steps_stay_quick(make: Make, tmp_path: Path) -> None:
    root, began = tmp_path / "run", time.process_time()
    backend, journal = open_backend(str(root)), Journal(root, rank=0)
    first = write_checkpoint(backend, 0, ARRAYS).ref
    for step in range(1, 1000):  # copies of one folder, whose manifests say so
        write_checkpoint(backend, step, {"x": ARRAYS["model/bias"]})
    for step in range(1000):
        journal(SaveStaged(step=step, nbytes=1, stall_seconds=0.01, tiers=(str(root),)))
        journal(SaveCommitted(step=step, tier=str(root), nbytes=1, durable_seconds=0.1))
    journal.close()
    written = time.process_time() - began
    assert (root / first.folder).is_dir()
    page = make(root)
    (tier,) = page.live.views[0].tiers
    assert tier.steps == 1000 or "no answer" in tier.error
    began = time.process_time()
    text = page.get("/run/0")
    seconds = time.process_time() - began
    assert len(rows(text)) == 1 + 50
    assert len(text) < 200_000
    assert seconds < written / 8, (seconds, written)  # A ratio, since machines differ
    assert "page 20 of 20" in text_of(page.get("/run/0?page=20"))
