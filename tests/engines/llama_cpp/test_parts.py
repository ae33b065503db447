"""The proxy's parts, each by itself: arguments, prompts, slots, costs, identity."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import tempfile
from pathlib import Path

import pytest

from kvd.errors import EngineUnsupported, InvalidRequest
from kvd.hashing import encode_tokens
from kvd_client.engines.llama_cpp.arguments import parse
from kvd_client.engines.llama_cpp.child import find_server, private_folder
from kvd_client.engines.llama_cpp.costs import UNKNOWN_WAIT_S, Costs
from kvd_client.engines.llama_cpp.identity import build_digest, options_digest, weights_digest
from kvd_client.engines.llama_cpp.keeper import has_tokens
from kvd_client.engines.llama_cpp.prompts import parse as parse_request
from kvd_client.engines.llama_cpp.prompts import tokens_of, with_slot
from kvd_client.engines.llama_cpp.proxy import _Tail
from kvd_client.engines.llama_cpp.slots import Slots


def words(text: str) -> list[str]:
    return text.split()


class TestArguments:
    def test_the_proxy_takes_the_place_and_the_server_keeps_the_rest(self):
        got = parse(words("-m a.gguf --port 81 -np 2 --host 0.0.0.0 --api-key k,l --jinja"), {})
        assert (got.host, got.port, got.api_key) == ("0.0.0.0", 81, "k")
        assert got.for_server == tuple(words("-m a.gguf -np 2 --api-key k,l --jinja"))

    def test_defaults_are_those_of_the_server_and_its_variables(self):
        assert (parse([], {}).host, parse([], {}).port) == ("127.0.0.1", 8080)
        got = parse([], {"LLAMA_ARG_HOST": "::1", "LLAMA_ARG_PORT": "5", "LLAMA_API_KEY": "k"})
        assert (got.host, got.port, got.api_key) == ("::1", 5, "k")

    @pytest.mark.parametrize(
        "same",
        ["--port 1 --host h", "-m other.gguf", "-t 9 -tb 9 -b 1 -ub 1", "--temp 0.1 -v --metrics", "-a name -n 5"],
    )
    def test_what_a_state_does_not_depend_on(self, same):
        assert parse(words(same), {}).identity == ()

    @pytest.mark.parametrize(
        "other",
        ["-ctk q8_0", "-ctv q4_0", "-fa on", "-np 3", "-c 99", "--rope-scaling yarn", "--lora a", "--new-option"],
    )
    def test_what_a_state_depends_on_or_nobody_knows(self, other):
        assert parse(words(other), {}).identity == tuple(words(other))

    def test_variables_count_as_options_do(self):
        environ = {"LLAMA_ARG_CACHE_TYPE_K": "q8_0", "LLAMA_ARG_THREADS": "3", "GGML_X": "1", "HOME": "/"}
        assert parse([], environ).identity == ("GGML_X=1", "LLAMA_ARG_CACHE_TYPE_K=q8_0")

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [("-md draft.gguf", "draft"), ("--embedding", "embeddings"), ("--models-dir d", "runs others")],
    )
    def test_servers_whose_states_are_not_enough(self, arguments, reason):
        assert reason in parse(words(arguments), {}).why_not

    @pytest.mark.parametrize("variable", ["MODEL_DRAFT", "EMBEDDINGS", "MODELS_DIR"])
    def test_variables_say_so_as_well(self, variable):
        assert parse([], {f"LLAMA_ARG_{variable}": "1"}).why_not

    @pytest.mark.parametrize("wrong", ["--port", "--port x", "--port 70000", "--api-key-file /nowhere/at/all"])
    def test_what_can_never_be_right(self, wrong):
        with pytest.raises(InvalidRequest):
            parse(words(wrong), {})

    def test_a_key_from_a_file(self, tmp_path):
        (tmp_path / "keys").write_text("first\nsecond\n")
        assert parse(["--api-key-file", str(tmp_path / "keys")], {}).api_key == "first"


LONG = "x" * 300


class TestPrompts:
    @pytest.mark.parametrize(
        "body",
        [
            '{"prompt": "short"}',
            '{"prompt": "%s", "n": 2}',
            '{"prompt": "%s", "id_slot": 1}',
            '{"prompt": "%s", "lora": [{"id": 0}]}',
            '{"prompt": "%s", "cache_prompt": false}',
            '["%s"]',
            '{"prompt": "%s"',
        ],
    )
    def test_requests_that_are_none_of_ours(self, body):
        assert parse_request("/completion", body.replace("%s", LONG).encode()) is None

    def test_other_paths_are_none_of_ours(self):
        assert parse_request("/embeddings", f'{{"prompt": "{LONG}"}}'.encode()) is None

    @pytest.mark.parametrize(
        ("path", "request_", "answers", "expected"),
        [
            ("/completion", {"prompt": "text"}, {"/tokenize": {"tokens": [1, 2]}}, [1, 2]),
            ("/completion", {"prompt": [3, 4]}, {}, [3, 4]),
            ("/completion", {"prompt": [3, "text"]}, {}, None),
            ("/completion", {"prompt": ["one", "two"]}, {}, None),
            ("/completion", {"prompt": [-1]}, {}, None),
            ("/completion", {}, {}, None),
            ("/completion", {"prompt": "text"}, {}, None),
            ("/v1/chat/completions", {"messages": "x"}, {"/apply-template": {"prompt": "t"}}, None),
            (
                "/v1/chat/completions",
                {"messages": [{"content": [{"type": "text", "text": "t"}]}]},
                {"/apply-template": {"prompt": "t"}, "/tokenize": {"tokens": [5]}},
                [5],
            ),
            (
                "/v1/chat/completions",
                {"messages": [{"content": [{"type": "image_url"}]}]},
                {"/apply-template": {"prompt": "t"}, "/tokenize": {"tokens": [5]}},
                None,
            ),
        ],
    )
    async def test_the_tokens_are_those_the_server_sees(self, path, request_, answers, expected):
        async def ask(asked: str, _body: object) -> object:
            return answers.get(asked)

        tokens = await tokens_of(path, request_, ask)
        assert tokens == (None if expected is None else encode_tokens(expected))

    def test_a_slot_is_named_and_nothing_else_changes(self):
        assert with_slot(b' {"a": 1.0}', 3) == b' {"id_slot":3,"a": 1.0}'


class TestSlots:
    async def test_the_slot_with_the_longest_common_prefix_is_given(self):
        slots = Slots(3)
        slots.all[1].tokens = encode_tokens([1, 2, 3])
        slots.all[2].tokens = encode_tokens([1, 2])
        slot, known = await slots.take(encode_tokens([1, 2, 3, 4]))
        assert (slot.number, known) == (1, 3)
        slot, known = await slots.take(encode_tokens([1, 2, 3, 4]))
        assert (slot.number, known) == (2, 2)

    async def test_without_any_the_one_used_longest_ago(self):
        slots = Slots(2)
        for expected in (0, 1, 0):
            slot, _ = await slots.take(b"")
            assert slot.number == expected
            slots.release(slot)

    async def test_who_waits_is_served_in_turn_and_who_leaves_loses_it(self):
        slots = Slots(1)
        slot, _ = await slots.take(b"")
        order: list[str] = []

        async def wait(name: str) -> None:
            taken, _ = await slots.take(b"")
            order.append(name)
            slots.release(taken)

        tasks = [asyncio.create_task(wait(name)) for name in "abcd"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        slots.release(slot)
        tasks[0].cancel()  # its turn has come, and it goes all the same
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["c", "d"]
        assert slots.num_taken == 0

    async def test_what_went_past_us_is_forgotten(self):
        slots = Slots(2)
        for slot in slots.all:
            slot.tokens = b"1234"
        taken, _ = await slots.take(b"")
        slots.forget()
        assert [slot.tokens for slot in slots.all] == [b"1234" if slot is taken else b"" for slot in slots.all]


class TestCosts:
    def test_a_restore_must_cost_half_of_what_it_saves_at_most(self):
        costs = Costs()
        assert costs.is_worth(1, 1 << 40), "nobody knows yet"
        assert costs.bound_s(10) == UNKNOWN_WAIT_S
        costs.computed(100, 1.0)
        costs.restored(1 << 20, 1.0)
        assert costs.restore_s_per_byte > 1e-7
        assert costs.is_worth(100, 1 << 20)
        assert not costs.is_worth(10, 1 << 20)
        assert costs.bound_s(50) == pytest.approx(0.5)

    def test_a_few_tokens_say_nothing(self):
        costs = Costs()
        costs.computed(3, 10.0)
        assert costs.prefill_s_per_token is None


class TestIdentity:
    def test_weights_are_their_content_in_all_their_parts(self, tmp_path):
        names = [f"m-{number:05}-of-00002.gguf" for number in (1, 2)]
        for name in names:
            (tmp_path / name).write_bytes(b"same")
        before = weights_digest(tmp_path / names[0])
        (tmp_path / names[1]).write_bytes(b"Same")
        assert weights_digest(tmp_path / names[0]) != before
        (tmp_path / names[1]).unlink()
        with pytest.raises(EngineUnsupported):
            weights_digest(tmp_path / names[0])

    def test_options_count_in_their_order_and_files_by_content(self, tmp_path):
        adapter = tmp_path / "lora.gguf"
        adapter.write_bytes(b"one")
        before = options_digest(["--lora", str(adapter)])
        scaled = options_digest(["--lora-scaled", f"{adapter}:0.5"])
        adapter.write_bytes(b"another")
        assert options_digest(["--lora", str(adapter)]) != before
        assert options_digest(["--lora-scaled", f"{adapter}:0.5"]) != scaled
        assert options_digest(["ab", "c"]) != options_digest(["a", "bc"])

    # case E5
    def test_a_build_is_the_content_of_what_is_loaded_wherever_it_lies(self, tmp_path):
        def build(folder: str, content: bytes) -> str:
            file = tmp_path / folder / "libllama-of-this-test.so"
            file.parent.mkdir()
            file.write_bytes(content)
            # As the loader maps code.
            flags, protection = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC
            with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, flags=flags, prot=protection):
                return build_digest()

        one = build("one", b"code")
        assert build("another folder", b"code") == one
        assert build("another build", b"Code") != one

    def test_a_process_without_llama_cpp_has_no_build(self):
        with pytest.raises(EngineUnsupported, match="nothing that looks like"):
            build_digest(os.getppid())
        with pytest.raises(EngineUnsupported):
            build_digest(1 << 30)


def test_a_state_has_its_tokens_behind_a_short_header():
    tokens = encode_tokens(range(100))
    assert has_tokens(memoryview(b"h" * 24 + tokens + b"state"), tokens)
    assert not has_tokens(memoryview(b"h" * 24 + tokens[:-4] + b"1234state"), tokens)
    assert not has_tokens(memoryview(b"h" * 200 + tokens), tokens)


def test_timings_are_read_from_the_end_and_not_from_what_was_said():
    tail = _Tail()
    said = b'{"content":"\\"cache_n\\":7,\\"prompt_n\\":7,\\"prompt_ms\\":7"'
    for piece in (b"x" * 5000, said, b',"timings":{"cache_n":10,"prompt', b'_n":20,"prompt_ms":30.5}}'):
        tail.add(piece)
    assert tail.timings() == (10, 20, pytest.approx(0.0305))
    assert _Tail().timings() is None


def test_folders_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path):
    with private_folder(str(tmp_path)) as mine:
        dead = tmp_path / "kvd-llama-dead"
        dead.mkdir()
        with private_folder(str(tmp_path)) as other:
            assert mine.exists()
            assert other != mine
            assert not dead.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["mkdtemp", "flock"])
def test_a_folder_that_another_proxy_removes_before_it_is_locked_is_made_again(tmp_path, monkeypatch, step):
    module = {"mkdtemp": tempfile, "flock": fcntl}[step]
    original = getattr(module, step)
    removed = []

    def beaten(*args, **kwargs):
        made = original(*args, **kwargs) if step == "mkdtemp" else None
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].rmdir()
        return made or original(*args, **kwargs)

    monkeypatch.setattr(module, step, beaten)
    with private_folder(str(tmp_path)) as mine:
        assert mine not in removed
        assert mine.is_dir()
        with private_folder(str(tmp_path)):
            assert mine.is_dir(), "it is locked"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_serve_is_refused(tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with pytest.raises(InvalidRequest, match="too long"), private_folder(str(long)):
        pass
    with pytest.raises(InvalidRequest, match="written"), private_folder(str(tmp_path / "absent")):
        pass
    assert list(long.iterdir()) == []


def test_a_server_is_found_or_named_in_vain(tmp_path, monkeypatch):
    program = tmp_path / "llama-server"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server(None) == [str(program)]
    assert find_server(str(program)) == [str(program)]
    with pytest.raises(InvalidRequest):
        find_server("no-such-server")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert find_server(None)[-1].endswith("xllamacpp_server")
    assert Path(find_server(None)[0]).exists()
