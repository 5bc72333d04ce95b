"""What `keel inspect` finds in files made for it, each by hand; then what it shows of rows, as text, JSON and page."""

import html.parser
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rich.console
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from keel import cli
from keel.data.encode import Encoder
from keel.errors import ConfigError, DataError
from keel.inspect import command, page, report, survey
from keel.inspect.tokens import Lengths, row_tokens
from keel.runs.console import Console
from keel.types import Demonstration, Prompt

U = {"role": "user", "content": "ask me"}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def found(taken: survey.Survey) -> dict[str, tuple[int, list[str]]]:
    """name -> count and the lines."""
    return {
        name: (each.count, [place.rsplit(":", 1)[1] for place in each.places]) for name, each in taken.found.items()
    }


class TestKinds:
    @pytest.mark.parametrize(
        ("row", "kind", "also"),
        [
            (pair("a", "b", "c"), "preference pair", ["thumb", "prompt"]),
            ({"chosen": [U], "rejected": [U]}, "preference pair", ["thumb", "prompt"]),
            ({"prompt": "a", "ranking": ["b", "c"]}, "preference pair", ["thumb", "prompt"]),
            ({"messages": [U], "label": True}, "thumb", ["demonstration", "prompt"]),
            ({"conversations": [U]}, "demonstration", ["prompt"]),
            ({"instruction": "a", "output": "b"}, "demonstration", ["prompt"]),
            ({"question": "a", "answer": "b"}, "prompt", []),
        ],
    )
    def test_by_the_first_row_with_known_fields(self, tmp_path: Path, row, kind, also):
        taken = survey.take(write(tmp_path / "a.jsonl", {"other": 1}, row))
        assert taken.kind.name == kind and taken.first.endswith(":2")
        assert [name.split(" (")[0].removesuffix("s") for name in taken.also] == also
        assert taken.read == 2 and sum(each.count for each in taken.refused.values()) == 1

    def test_lines_of_text_are_prompts(self, tmp_path: Path):
        (tmp_path / "a.txt").write_text("one\ntwo words\n")
        taken = survey.take(tmp_path / "a.txt")
        assert (taken.kind.name, list(taken.lengths["prompt"])) == ("prompt", [1, 2])

    def test_another_kind_when_asked(self, tmp_path: Path):
        path = write(tmp_path / "a.jsonl", {"instruction": "a", "output": "b"}, {"instruction": "c", "output": ""})
        assert survey.take(path).kept == 1
        assert survey.take(path, kind="prompts").kept == 2

    def test_no_kind(self, tmp_path: Path):
        path = write(tmp_path / "a.jsonl", {"query": "q", "reply": "r", "id": 1})
        with pytest.raises(DataError, match=r"of a kind that Keel reads; the first has query \(text\)") as caught:
            survey.take(path)
        assert "demonstrations: columns: {prompt: query, completion: reply}" in caught.value.remedy
        assert survey.take(path, columns={"prompt": "query", "completion": "reply"}).kind.name == "demonstration"


class TestCounts:
    def test_everything_that_can_be_wrong_with_pairs(self, tmp_path: Path):
        held = write(tmp_path / "held.jsonl", {"prompt": " shared "}, {"prompt": "other"})
        path = write(
            tmp_path / "a.jsonl",
            pair("shared", "a longer one", "short one"),  # 1
            pair("q", "x y", "x y z"),  # 2
            pair("q", "x y z", "x y"),  # 3: the other way round
            pair("q", "x y", "x y z"),  # 4: again, so both findings
            pair("r", "one", "two words"),  # 5
            pair("s", "na\u00efve \ufffd here", "b c"),  # 6
            pair("t", "caf\u00c3\u00a9 noir", "it\u00e2\u20ac\u2122s so"),  # 7
            pair("u", "a\x00 b", "b\u0085 c"),  # 8
            pair("same", "s", " s"),  # 9
            pair("empty", "", "s"),  # 10
            pair("half \ud83d", "l m", "n o"),  # 11: repaired, and by a replacement character
            {"prompt": 7, "chosen": "a", "rejected": "b"},  # 12
            "oops",  # 13
        )
        taken = survey.take(path, held_out=held)
        assert (taken.read, taken.kept, taken.prompts) == (13, 9, 7)
        assert {name: each.places for name, each in taken.dropped.items()} == {
            "identical pair": [f"{path}:9"],
            "empty response": [f"{path}:10"],
        }
        assert [each.count for each in taken.refused.values()] == [1, 1]
        assert {name: each.count for name, each in taken.repaired.items()} == {"half a surrogate pair": 1}
        assert found(taken) == {
            "prompt stands in the held-out file": (1, ["1"]),
            "judged the other way round before": (2, ["3", "4"]),
            "repeats an earlier row": (1, ["4"]),
            "response of one word": (1, ["5"]),
            "replacement character (U+FFFD)": (2, ["6", "11"]),
            "mojibake": (1, ["7"]),
            "control character": (1, ["8"]),
            "chosen is longer than rejected": (3, []),
        }
        assert taken.among("chosen is longer than rejected") == (6, "pair of unequal length")
        assert taken.among("response of one word") == (18, "response")
        assert taken.among("mojibake") == (9, "pair")

    def test_thumbs(self, tmp_path: Path):
        rows = [{"prompt": "a", "completion": "b", "label": up} for up in (True, False, True)]
        taken = survey.take(write(tmp_path / "a.jsonl", *rows))
        assert taken.up == 2
        assert found(taken)["repeats an earlier row"] == (1, ["3"])  # the second is judged otherwise

    @pytest.mark.parametrize(
        "text", ["café — olé", "NÃO, São Paulo", "À « la » carte", "Â", "x²", "Ünï", "日本語", "50 €"]
    )
    def test_honest_text_is_no_mojibake(self, text: str):
        assert not survey.is_mojibake(text)
        garbled = text.encode().decode("latin-1")
        assert survey.is_mojibake(garbled) == (garbled != text)

    def test_percentiles(self):
        assert survey.percentiles(range(1, 101)) == {
            "min": 1,
            "p50": 50,
            "p90": 90,
            "p99": 99,
            "max": 100,
            "mean": 50.5,
        }
        assert set(survey.percentiles([7]).values()) == {7}

    def test_a_file_that_no_row_of_can_be_used(self, tmp_path: Path):
        path = write(tmp_path / "a.jsonl", pair("", "a", "b"), pair("a", "b", "b"))
        told = report.report(survey.take(path, shown=2), {}, [])
        assert told["rows"] == {"read": 2, "kept": 0, "dropped": 2, "refused": 0}
        page.page(told)
        report.show(told, Console(rich.console.Console(file=io.StringIO())), ids=False)


VOCABULARY = ["<unk>", "<s>", "</s>", "[user]", "[bot]", "ask", "me", "yes", "no", "really"]


def encoder(prompt: int = 9, response: int = 4) -> Encoder:
    raw = Tokenizer(models.WordLevel({word: at for at, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.chat_template = "<s> {% for m in messages %}[{{ m.role }}] {{ m.content | trim }} {% endfor %}[bot]"
    return Encoder(made, "chat", prompt, response, (2,))


class TestTokens:
    def test_what_each_token_is_for(self):
        parts = row_tokens(encoder(), Demonstration(Prompt((U | {"content": " ask me "},)), "yes really"))
        assert {
            name: [(token.id, token.text.strip(), token.use) for token in part] for name, part in parts.items()
        } == {
            "prompt": [
                (1, "<s>", "template"),
                (3, "[user]", "template"),
                (5, "ask", "prompt"),
                (6, "me", "prompt"),
                (4, "[bot]", "template"),
            ],
            "response": [(7, "yes", "response"), (9, "really", "response"), (2, "</s>", "end")],
        }

    def test_every_turn_with_its_gap(self):
        """One sequence where the template ends turns with the end token, one a turn where it does not."""
        said = Demonstration(Prompt((U, {"role": "assistant", "content": "yes"}, U | {"content": "really"})), "no")
        made = encoder(prompt=99)
        made.tokenizer.chat_template = (
            "<s> {% for m in messages %}{% if m.role == 'assistant' %}[bot] {{ m.content }} </s> {% else %}"
            "[user] {{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
        )
        made = Encoder(made.tokenizer, "chat", 99, 9, (2,))
        (part,) = row_tokens(made, said, every_turn=True).values()
        assert [(token.id, token.use) for token in part] == [
            *[(1, "template"), (3, "template"), (5, "prompt"), (6, "prompt"), (4, "template")],
            *[
                (7, "response"),
                (2, "end"),
                (3, "template"),
                (9, "prompt"),
                (4, "template"),
                (8, "response"),
                (2, "end"),
            ],
        ]
        told = report.report(
            survey.Survey([], survey.KINDS["demonstrations"](), (), "", []), {"drift": made.drift()}, []
        )
        assert made.drift() == report.drift(told) == ""
        parts = row_tokens(encoder(prompt=99), said, every_turn=True)
        assert list(parts) == ["sequence 1", "sequence 2"] and report.drift({"encoded": {"drift": encoder().drift()}})
        assert [token.use for token in parts["sequence 1"]][-2:] == ["response", "end"]
        assert [token.id for token in parts["sequence 2"]][-2:] == [8, 2]

    def test_a_cut_row_is_shown_as_it_is_trained_on(self):
        parts = row_tokens(encoder(4, 2), Demonstration(Prompt((U,)), "yes really"))
        assert [(token.id, token.use) for token in parts["prompt"]] == [
            (1, "template"),
            (5, "prompt"),
            (6, "prompt"),
            (4, "template"),
        ]
        assert [token.use for token in parts["response"]] == ["response", "response"]

    def test_lengths_before_the_cut_and_what_is_cut(self, tmp_path: Path):
        path = write(
            tmp_path / "a.jsonl", pair("ask me", "yes really </s> no", "no"), pair("ask", "yes no yes no", "yes")
        )
        taken = survey.take(path, measure=Lengths(encoder(4, 4)), unit="token")
        assert {name: list(values) for name, values in taken.lengths.items()} == {
            "prompt": [5, 4],
            "chosen": [3, 5],
            "rejected": [2, 2],
        }
        assert found(taken) == {
            "prompt is cut": (1, ["1"]),
            "end token inside the response": (1, ["1"]),
            "response is cut": (1, ["2"]),
            "response of one token": (2, ["1", "2"]),
            "chosen is longer than rejected": (2, []),
        }

    def test_a_template_that_refuses_is_counted(self, tmp_path: Path):
        made = encoder()
        made.tokenizer.chat_template = "{{ raise_exception('no') }}"
        made = Encoder(made.tokenizer, "chat", 9, 9, (2,))
        taken = survey.take(write(tmp_path / "a.jsonl", pair("a", "b", "c")), measure=Lengths(made), unit="token")
        assert (taken.kept, list(taken.refused)) == (0, ["The chat template refuses these messages: no"])


class Reader(html.parser.HTMLParser):
    """The page's text, and whatever it would fetch or run."""

    def __init__(self):
        super().__init__()
        self.words, self.alien = "", []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        if tag in ("script", "link", "img", "iframe") or any(name in ("src", "href", "onclick") for name, _ in attrs):
            self.alien.append(tag)

    def handle_data(self, data: str):
        self.words += data


class TestShown:
    @pytest.fixture
    def told(self, tmp_path: Path) -> dict[str, Any]:
        path = write(
            tmp_path / "a.jsonl", {**pair("ask <b>", "yes really", "no"), "id": "<script>"}, pair("a", "b", "b")
        )
        made = encoder()
        taken = survey.take(path, measure=Lengths(made), unit="token", shown=2)
        limits = {"model": "M", "template": "tokenizer", "max_prompt_tokens": 9, "max_response_tokens": 4}
        return report.report(taken, limits, [row_tokens(made, record) for record in taken.records])

    def test_terminal(self, told):
        file = io.StringIO()
        report.show(told, Console(rich.console.Console(file=file, width=150, highlight=False)), ids=False)
        text = file.getvalue()
        assert "preference pairs, for reward.data or preference.data: line 1 has prompt + chosen + rejected" in text
        assert "1 of 2 rows are kept, 1 dropped, 1 distinct prompts" in text
        assert "dropped: 1 x identical pair  (line 2)" in text
        assert "! response of one token: 1 of 2 responses (50.0 %): line 1" in text
        assert "prompt, 5 tokens\n<s> [user] ask <unk> [bot]\n" in text
        assert "«yes really»« </s>»" in text

    def test_ids(self, told):
        file = io.StringIO()
        report.show(told, Console(rich.console.Console(file=file, width=150, highlight=False)), ids=True)
        assert "<s>⟨1⟩ [user]⟨3⟩ ask⟨5⟩" in file.getvalue()

    def test_page(self, told):
        text = page.page(told)
        reader = Reader()
        reader.feed(text)
        assert reader.alien == [] and "http" not in text and "@import" not in text
        assert "<script>" in reader.words and "identical pair" in reader.words and "line 1" in reader.words
        assert re.search(r"<span class=end title=2>\s*&lt;/s&gt;", text)

    def test_json_holds_the_same(self, told):
        again = json.loads(json.dumps(told))
        assert again["rows"] == {"read": 2, "kept": 1, "dropped": 1, "refused": 0}
        assert again["shown"][0]["tokens"]["prompt"][0] == {"id": 1, "text": "<s>", "use": "template"}
        assert sum(bar["rows"] for bar in again["histograms"]["chosen"]) == 1


class TestCommand:
    def test_json_page_and_exit_code(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        path = write(tmp_path / "a.jsonl", pair("a", "b", "c d"))
        with pytest.raises(SystemExit) as left:
            cli.main(["inspect", path, "--json", "--html", str(tmp_path / "a.html"), "--held-out", path])
        assert left.value.code == 0
        told = json.loads(capsys.readouterr().out)
        assert told["kind"] == "preference pair" and told["unit"] == "word"
        assert "prompt stands in the held-out file" in (tmp_path / "a.html").read_text()

    @pytest.mark.parametrize(
        ("row", "flags", "reason"),
        [
            (pair("a", "b", "b"), [], "identical pair"),
            (pair("a", "b", "b"), ["--json"], "identical pair"),
            ({"prompt": 7}, ["--kind", "prompts"], "'prompt' holds number"),
        ],
    )
    def test_where_no_row_can_be_used_the_report_is_shown_and_the_exit_code_says_so(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], row, flags, reason
    ):
        path = write(tmp_path / "a.jsonl", row, row)
        with pytest.raises(SystemExit) as left:
            cli.main(["inspect", path, *flags])
        told = capsys.readouterr()
        assert left.value.code == 2 and reason in told.out
        assert told.err.startswith(f"keel: no row of 2 can be used\n  where:  {path}\n  remedy: the report")
        if flags == ["--json"]:
            assert json.loads(told.out)["rows"] == {"read": 2, "kept": 0, "dropped": 2, "refused": 0}

    @pytest.mark.parametrize(
        ("flags", "what"),
        [
            ([], "needs a file"),
            (["a.jsonl", "--ids"], "nothing without --model"),
            (["a.jsonl", "--max-prompt-tokens", "9"], "nothing without --model"),
            (["a.jsonl", "--rows", "-1"], "--rows: it should be greater than or equal to 0, not -1"),
            (["recipe.yaml"], "this is a recipe"),
            (["a.jsonl", "--model", "smollm2"], "made by a run"),
            (
                ["a.jsonl", "--model", "M", "--max-prompt-tokens", "0"],
                "--max-prompt-tokens: it should be greater than or equal to 1, not 0",
            ),
            (["a.jsonl", "--html", "/nowhere/at/all"], "the page cannot be written"),
        ],
    )
    def test_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags, what):
        monkeypatch.chdir(tmp_path)
        write(tmp_path / "a.jsonl", pair("a", "b", "c"))
        with pytest.raises(ConfigError, match=what):
            command.inspect(flags, Console(rich.console.Console(file=io.StringIO())))

    def test_it_needs_no_torch_without_a_model(self, tmp_path: Path):
        path = write(tmp_path / "a.jsonl", pair("a", "b", "c"))
        code = (
            "import io, sys, rich.console\n"
            "from keel.inspect.command import inspect\nfrom keel.runs.console import Console\n"
            f"inspect([{path!r}], Console(rich.console.Console(file=io.StringIO())))\n"
            "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        )
        root = Path(__file__).resolve().parents[2]
        assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0

    def test_every_turn_of_a_conversation_and_what_its_template_does(self, tmp_path: Path, tiny_model: Path):
        said = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))]
        path = write(tmp_path / "a.jsonl", {"messages": [*said, {"role": "assistant", "content": "d"}]})
        file = io.StringIO()
        console = Console(rich.console.Console(file=file, width=200, highlight=False))
        page_file = str(tmp_path / "a.html")
        command.inspect([path, "--model", str(tiny_model), "--loss-on", "every", "--html", page_file], console)
        drifts = "writes earlier turns" in file.getvalue()
        assert drifts == ("sequence 1" in file.getvalue()) == ("writes earlier turns" in Path(page_file).read_text())
        assert "sequence" in file.getvalue() and "«b»" in file.getvalue() and "«d»" in file.getvalue()

    def test_with_a_model(self, tmp_path: Path, tiny_model: Path):
        path = write(tmp_path / "a.jsonl", pair("Where is it?", "Here.", "There."))
        file = io.StringIO()
        console = Console(rich.console.Console(file=file, width=200, highlight=False))
        command.inspect([path, "--model", str(tiny_model), "--max-response-tokens", "3", "--ids"], console)
        text = file.getvalue()
        assert "template: the tokenizer's own, at most 512 tokens a prompt and 3 a response" in text
        assert "its end is cut" in text and "<user>⟨" in text


@pytest.mark.parametrize(
    ("name", "kind", "kept"),
    [
        ("hh_harmless.jsonl.gz", "preference pair", 1495),
        ("dpo_en_demo.json", "preference pair", 300),
        ("kto_en_demo.json", "thumb", 300),
        ("alpaca_en_demo.json", "demonstration", 999),
        ("gsm8k_train_2000.jsonl.gz", "prompt", 2000),
        ("rt-polarity.pos", "prompt", 5331),
    ],
)
def test_real_files(shared: Path, name: str, kind: str, kept: int):
    taken = survey.take(shared / "data" / name)
    assert (taken.kind.name, taken.kept, taken.refused) == (kind, kept, {})
